-- The fixed window, aligned to the clock: a count that restarts at every full period.
--
-- The state is the start of the window, the cost admitted in it, and its end. A count above the
-- capacity, up to `most`, is owed: each following window begins with what is left of it once the
-- capacity has been taken off. The Rust twin is fixed_window.rs in ratelimit-core. README.md beside
-- this file specifies what each section receives and what it leaves.

--- fresh
start, count, ends_us = now, 0, now

--- valid
start < 2^52

--- level
local begun, held, written_us = start, count, ends_us
local current, used = now - now % window_us, 0
if now < ends_us then
  -- A state written under a larger limit is capped at this limit.
  used = count < most and count or most
  if start < current then used = math.max(used - floor((current - start) / window_us) * capacity, 0) end
else
  held, start = 0, current
end
-- An earlier window is over. A later one, written before the clock went back, counts.
if start < current then start = current end
if start > at then at = start end

--- move
count = after
ends_us = start + (count > capacity and ceil(count / capacity) or 1) * window_us
expires = ends_us

--- terms
-- The count that the charge leaves, and what a window pays.
count, capacity, 0

--- give
-- A charge of a past window counts in the state of that window. In a later one it counts less what
-- each window since may have paid of it, under either limit, and what passes the most that this one
-- counts.
local window = made and made - made % window_us
if made and window ~= begun then
  local terms = reservation and reservation.terms or { 0, 0, 0 }
  local windows = floor((start - window) / window_us)
  local paid, lost = windows * math.max(terms[2], capacity), math.max(terms[1] - most, 0)
  charge = window > start and 0 or math.max(charge - paid - lost, 0)
end

--- carry
-- The change counts in the window as it was written: another limit may count more in it, or be owed
-- for longer. Only a count that this limit could not read begins anew in the current window.
if held > 0 then
  local counts = after > used and held + after - used or held - charge
  if counts < 0 then counts = 0 end
  local capped, before = counts < most and counts or most, held < most and held or most
  local gone_us = begun + (capped > capacity and ceil(capped / capacity) or 1) * window_us
  local own = held <= most
    and written_us == begun + (before > capacity and ceil(before / capacity) or 1) * window_us
  if not own then
    -- A charge of a later window of this limit counts there, and for the other limit still in its
    -- own.
    if after <= used or start < begun then start = begun end
    count, ends_us = math.min(counts, 2^52 - 1), capped > capacity and math.max(written_us, gone_us) or written_us
  elseif counts <= most then
    start, count, ends_us = begun, counts, gone_us
  end
  expires = ends_us
end
gone = count == 0 or ends_us <= now
