-- The sliding counter: two fixed windows, the older one weighed by how much of it is still in view.
--
-- What is `used` is floor(previous * overlap / window_us) of the window before, and everything of the current
-- one. The state is when the current window began, and what both admitted. The Rust twin is
-- sliding_counter.rs in ratelimit-core. README.md beside this file says what each section is given, and what
-- it leaves.

--- fresh
start, previous, current = now, 0, 0

--- valid
start < 2^52

--- level
-- The start is aligned anew: it may have been written for a window of another length. What was admitted
-- under a larger limit counts as no more than this one's.
start = start - start % window_us
if previous > capacity then previous = capacity end
if current > capacity then current = capacity end
local begun = now - now % window_us
-- A window from after the current one, by a clock that went back, counts.
if start < begun then
  previous = start + window_us == begun and current or 0
  start, current = begun, 0
end
local overlap_us = now > start and window_us - (now - start) or window_us
local weighed = 0
if previous * overlap_us < 2^52 then
  weighed = floor(previous * overlap_us / window_us)
else
  -- The product is too large for a double, and is never made: `previous` goes in bit by bit.
  local bits, rest = previous, 0
  for bit = 51, 0, -1 do
    weighed, rest = 2 * weighed, 2 * rest
    if rest >= window_us then weighed, rest = weighed + 1, rest - window_us end
    if bits >= 2 ^ bit then
      bits, rest = bits - 2 ^ bit, rest + overlap_us
      if rest >= window_us then weighed, rest = weighed + 1, rest - window_us end
    end
  end
end
local used = weighed + current

--- fill
-- The current window counts up to the limit, whatever overlaps of the previous one.
if current + charge > capacity then charge = capacity - current end
after = used + charge

--- move
current = current + after - used
-- A count of n stops to matter when less than an n-th of its window is in view.
if current > 0 then
  expires = start + 2 * window_us - ceil(window_us / current) + 1
else
  expires = start + window_us - ceil(window_us / previous) + 1
end

--- wait
-- It fits when so much of the older window that counts has gone: a count fades in the window after its own.
local begins, count, most = start, previous, room - current
if room < current then begins, count, most = start + window_us, current, room end
if count <= most then
  fits_us = begins
else
  -- count * overlap / window_us < most + 1 holds up to this overlap.
  local faded_us, rest = multiplied_divided(most + 1, window_us, count)
  if rest == 0 then faded_us = faded_us - 1 end
  fits_us = begins + window_us - faded_us
end

--- mark
start

--- give
-- What past windows admitted stays.
if charge > current then charge = current end
if made and made ~= start then charge = 0 end
