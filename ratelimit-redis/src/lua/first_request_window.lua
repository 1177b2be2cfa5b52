-- The window that begins with the first request: a count that lives for one period.
--
-- The state is the time of the first request, the cost admitted since, and the end of the window.
-- The Rust twin is fixed_window.rs in ratelimit-core. README.md beside this file specifies what
-- each section receives and what it leaves.

--- fresh
start, count, ends_us = now, 0, now

--- valid
start < 2^52

--- level
-- A request before the start, after the clock went back, belongs to the window too.
if now >= ends_us or now >= start + window_us then start, count = now, 0 end
-- A larger limit may have counted more than the capacity. A limit of 0 counts nothing.
local used = capacity > 0 and count or 0

--- move
count = after
ends_us = start + window_us
expires = ends_us

--- mark
start

--- give
-- A charge of a past window no longer counts.
if made and made ~= start then charge = 0 end
