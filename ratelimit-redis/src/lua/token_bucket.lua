-- The token bucket: tokens flow in at a steady rate, requests take them out.
--
-- One token is `unit` units, `tick_units` flow in at each refill tick, and a tick is `tick_us` long: one
-- microsecond for all but the largest numbers. What is `used` of a limit is what the bucket lacks.
--
-- The state is the whole `tokens`, the `remainder` of units beyond them, the `tick` at which it was
-- written, and how long before that units flowed in last, `since_us`.
--
-- The Rust twin is token_bucket.rs in ratelimit-core. README.md beside this file says what each section is
-- given, and what it leaves.

--- fresh
tokens, remainder, tick, since_us = capacity / unit, 0, now, 0

--- valid
tick < 2^52

--- level
-- A time before the state's own counts as the state's.
if tick > at then at = tick end
-- A state written under a larger limit holds no more than this one's burst.
if remainder >= unit then remainder = unit - 1 end
local units = tokens * unit + remainder
if units > capacity then units = capacity end
-- When units flowed in last: less than a tick before the state was written.
if since_us >= tick_us then since_us = tick_us - 1 end
if since_us > tick then since_us = tick end
local anchor = tick - since_us
local ticks = floor((at - anchor) / tick_us)
if ticks >= ceil((capacity - units) / tick_units) then
  units, anchor = capacity, at
else
  units, anchor = units + ticks * tick_units, anchor + ticks * tick_us
end
local used = capacity - units

--- move
-- A bucket that lacks less than a tick's flow may have been full for most of the tick under way. What is
-- taken out now must not be made good by the part of the tick that is over: a new tick begins with it. (Ticks
-- of a microsecond end with the moment they begin in: there this changes nothing.)
if after > used and used < tick_units then anchor = at end
units = capacity - after
tokens = floor(units / unit)
remainder = units - tokens * unit
tick, since_us = at, at - anchor
expires = anchor + ceil(after / tick_units) * tick_us

--- wait
fits_us = anchor + ceil((used - room) / tick_units) * tick_us

--- give
-- Of a charge that was made then: all of it if the key was charged last when this was; otherwise what cannot
-- have flowed back since, whatever else was charged.
if made and charge > capacity then charge = capacity end
if made and tick ~= made then
  local ago_us = now > made and now - made or 0
  local full_us = ceil(capacity / tick_units) * tick_us
  local flowed = ago_us < full_us and ceil(ago_us / tick_us) * tick_units or charge
  charge = charge > flowed and charge - flowed or 0
end
