-- The window that begins with the first request: a count that lives for one period.
--
-- The state is the time of the first request, the cost admitted since, and the end of the window. The Rust twin is
-- fixed_window.rs in ratelimit-core. README.md beside this file specifies what each section
-- receives and what it leaves.

--- fresh
start, count, ends_us = now, 0, now

--- valid
start < 2^52

--- level
local begun, held, kept = start, count, ends_us
if now >= ends_us then held = 0 end
-- A request before the start, after the clock went back, belongs to the window too. A window of another length is
-- over when it ends, or when one of this length would.
if held == 0 or now >= start + window_us then start, count = now, 0 end
-- A state written under a larger limit is capped at this limit.
local used = count
if used > capacity then used = capacity end

--- move
count = after
ends_us = start + window_us
expires = ends_us

--- mark
start

--- give
-- A charge of a past window no longer counts.
if made and made ~= start then charge = 0 end

--- carry
-- Another limit may have written the state, and count more, or for longer: the change counts in its window.
if held > 0 then
  count = after > used and held + after - used or held - charge
  if count < 0 then count = 0 end
  if count >= 2^52 then count = 2^52 - 1 end
  -- A charge of a later window of this limit counts there, and for the other limit still in its own.
  if after <= used or start < begun then start = begun end
  ends_us, expires, gone = kept, kept, count == 0
end
