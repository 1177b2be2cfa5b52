-- The window that begins with the first request: a count that lives for one period.
--
-- The state is the time of the first request and the cost admitted since. The Rust twin is
-- first_request_window.rs in ratelimit-core. README.md beside this file specifies what each section
-- receives and what it leaves.

--- fresh
start, count = now, 0

--- valid
start < 2^52

--- level
-- A request before the start, after the clock went back, belongs to the window too.
if now >= start + window_us then start, count = now, 0 end
-- A state written under a larger limit is capped at this limit.
local used = count
if used > capacity then used = capacity end

--- move
count = after
expires = start + window_us

--- wait
fits_us = start + window_us

--- mark
start

--- give
-- A charge of a past window no longer counts.
if made and made ~= start then charge = 0 end
