-- The fixed window, aligned to the clock: a count that restarts at every full period.
--
-- The state is the start of the window, the cost admitted in it, and its end. The Rust twin is
-- fixed_window.rs in ratelimit-core. README.md beside this file specifies what each section receives and what it leaves.

--- fresh
start, count, ends_us = now, 0, now

--- valid
start < 2^52

--- level
local begun, held, kept = start, count, ends_us
-- A window of another length is over when it ends.
if now >= ends_us then held, count = 0, 0 end
-- Align the start again, for the same reason.
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
ends_us = start + window_us
expires = ends_us

--- give
-- A charge of a past window no longer counts.
if made and made - made % window_us ~= start then charge = 0 end

--- carry
-- Another limit may have written the state, and count more, or for longer: the change counts in its window.
if held > 0 then
  count = after > used and held + after - used or held - charge
  if count < 0 then count = 0 end
  if count >= 2^52 then count = 2^52 - 1 end
  start, ends_us, expires, gone = begun, kept, kept, count == 0
end
