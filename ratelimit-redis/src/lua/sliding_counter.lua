-- The sliding counter: two fixed windows, the older one weighted by its overlap with the sliding window.
--
-- `used` is floor(previous * overlap / window_us) plus the count of the current window. The state is the
-- start of the current window, the counts of both, and their length. The Rust twin is
-- sliding_counter.rs in ratelimit-core. README.md beside this file specifies what each section receives and what it leaves.

--- fresh
start, previous, current, span_us = now, 0, 0, window_us

--- valid
start < 2^52 and span_us > 0 and span_us < 2^51

--- level
local first, before, held, kept = start, previous, current, span_us
-- Windows of another length are past when they are for the limit that counted in them.
local until_us = 2^53
if span_us ~= window_us then
  until_us = start + span_us - ceil(span_us / previous) + 1
  if current > 0 then until_us = start + 2 * span_us - ceil(span_us / current) + 1 end
  if now >= until_us then previous, current = 0, 0 end
end
-- Align the start again: it may belong to a window of another length. Counts admitted under a larger
-- limit are capped at this limit.
start = start - start % window_us
if previous > capacity then previous = capacity end
if current > capacity then current = capacity end
local begun = now - now % window_us
-- A window later than the current one, written before the clock went back, counts.
if start < begun then
  previous = start + window_us == begun and current or 0
  start, current = begun, 0
end
local overlap_us = now > start and window_us - (now - start) or window_us
local weighed = 0
if previous * overlap_us < 2^52 then
  weighed = floor(previous * overlap_us / window_us)
else
  -- The product is too large for a double, so `previous` is multiplied in bit by bit.
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

--- held
-- The windows as the limit that wrote them counts them; this limit's if they are past.
if now < until_us then
  local turned = now - now % kept
  first = first - first % kept
  if first < turned then
    before = first + kept == turned and held or 0
    first, held = turned, 0
  end
else
  first, before, held, kept = start, 0, 0, window_us
end

--- fill
-- The current window fills up to the limit, whatever overlap the previous one has.
if current + charge > capacity then charge = capacity - current end
after = used + charge

--- move
current = current + after - used
span_us = window_us
-- A count of n stops mattering when less than an n-th of its window overlaps.
if current > 0 then
  expires = start + 2 * window_us - ceil(window_us / current) + 1
else
  expires = start + window_us - ceil(window_us / previous) + 1
end

--- mark
start

--- give
-- Counts of past windows stay.
if charge > held then charge = held end
if current == 0 then charge = 0 end
if made and made ~= start then charge = 0 end

--- carry
-- Another limit may have written the state, and count more, or for longer: the change counts in its windows.
-- A charge of a later window of this limit counts there, and for the other limit still in its own.
if after <= used or start < first then start = first end
previous, span_us = before, kept
current = after > used and held + after - used or held - charge
if current >= 2^52 then current = 2^52 - 1 end
if current > 0 then
  expires = start + 2 * kept - ceil(kept / current) + 1
else
  expires = start + kept - ceil(kept / previous) + 1
end
gone = expires <= now
