-- The fixed window, aligned to the clock: a count that restarts at every full period.
--
-- The state is the start of the window and the cost admitted in it. The Rust twin is fixed_window.rs in
-- ratelimit-core. README.md beside this file specifies what each section receives and what it leaves.

--- fresh
start, count = now, 0

--- valid
start < 2^52

--- level
-- Align the start again: it may belong to a window of another length.
start = start - start % window_us
local current = now - now % window_us
-- An earlier window is over. A later one, written before the clock went back, counts.
if start < current then start, count = current, 0 end
if start > at then at = start end
-- A state written under a larger limit is capped at this limit.
local used = count
if used > capacity then used = capacity end

--- move
count = after
expires = start + window_us

--- wait
fits_us = start + window_us

--- give
-- A charge of a past window no longer counts.
if made and made - made % window_us ~= start then charge = 0 end
