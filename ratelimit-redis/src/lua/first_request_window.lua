-- The window that begins with the first request: a count that lives for one period.
--
-- The state is when the first request came, and what has been admitted since. The Rust twin is
-- first_request_window.rs in ratelimit-core. README.md beside this file says what each section is given, and
-- what it leaves.

--- fresh
start, count = now, 0

--- valid
start < 2^52

--- level
-- A request from before the start, by a clock that went back, falls into the window too.
if now >= start + window_us then start, count = now, 0 end
-- A state written under a larger limit owes no more than this limit.
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
-- What was charged in a window that is past counts no longer.
if made and made ~= start then charge = 0 end
