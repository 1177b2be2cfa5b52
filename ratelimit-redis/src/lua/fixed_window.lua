-- The fixed window, aligned to the clock: a count that starts anew at every full period.
--
-- The state is when the window began, and what has been admitted in it. The Rust twin is fixed_window.rs in
-- ratelimit-core. README.md beside this file says what each section is given, and what it leaves.

--- fresh
start, count = now, 0

--- valid
start < 2^52

--- level
-- The start is aligned anew: it may have been written for a window of another length.
start = start - start % window_us
local current = now - now % window_us
-- A window from before the current one is over. One from after it, by a clock that went back, counts.
if start < current then start, count = current, 0 end
if start > at then at = start end
-- A state written under a larger limit owes no more than this limit.
local used = count
if used > capacity then used = capacity end

--- move
count = after
expires = start + window_us

--- wait
fits_us = start + window_us

--- give
-- What was charged in a window that is past counts no longer.
if made and made - made % window_us ~= start then charge = 0 end
