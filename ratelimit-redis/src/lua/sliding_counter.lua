-- The sliding counter: two fixed windows, the older one weighted by its overlap with the sliding
-- window.
--
-- `used` is floor(previous * overlap / window_us) plus the count of the current window. The state
-- is the start of the current window, and the counts of both. The Rust twin is sliding_counter.rs
-- in ratelimit-core. README.md beside this file specifies what each section receives and what it
-- leaves.

--- fresh
start, previous, current = now - now % window_us, 0, 0

--- valid
start < 2^52

--- level
local begun = now - now % window_us
-- A window later than the current one, written before the clock went back, counts.
if start < begun then
  previous = start + window_us == begun and current or 0
  start, current = begun, 0
end
-- Counts admitted under a larger limit count up to this one, and stay.
local old = previous < capacity and previous or capacity
local counted = current < capacity and current or capacity
local overlap_us = now > start and window_us - (now - start) or window_us
local weighed = 0
if old * overlap_us < 2^52 then
  weighed = floor(old * overlap_us / window_us)
else
  -- The product is too large for a double, so `old` is multiplied in bit by bit.
  local bits, rest = old, 0
  for bit = 51, 0, -1 do
    weighed, rest = 2 * weighed, 2 * rest
    if rest >= window_us then weighed, rest = weighed + 1, rest - window_us end
    if bits >= 2 ^ bit then
      bits, rest = bits - 2 ^ bit, rest + overlap_us
      if rest >= window_us then weighed, rest = weighed + 1, rest - window_us end
    end
  end
end
local used = weighed + counted

--- fill
-- The current window fills up to the limit, whatever overlap the previous one has.
if counted + charge > capacity then charge = capacity - counted end
after = used + charge

--- move
current = current + after - used
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
if charge > counted then charge = counted end
if made and made ~= start then charge = 0 end

--- carry
-- Another limit may count more than this one.
gone = expires <= now
