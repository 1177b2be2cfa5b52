-- The token bucket: tokens refill at a steady rate, and requests take them. One token is `unit` units.
-- Each refill tick adds `tick_units`, and a tick lasts `tick_us`: one microsecond for all but the
-- largest numbers. `used` is what the bucket lacks.
--
-- The state is the whole `tokens`, the `remainder` in units, the `timestamp` at which it was
-- written, and `since_us`, how long before that the last refill was.
--
-- The Rust twin is token_bucket.rs in ratelimit-core. README.md beside this file specifies what each
-- section receives and what it leaves.

--- fresh
tokens, remainder, timestamp, since_us = capacity / unit, 0, now, 0

--- valid
timestamp < 2^52

--- level
-- A time before the state counts as the state's time.
if timestamp > at then at = timestamp end
-- A state written under a larger limit is capped at this limit's burst.
if remainder >= unit then remainder = unit - 1 end
local units = tokens * unit + remainder
if units > capacity then units = capacity end
-- The last refill: less than a tick before the state was written.
if since_us >= tick_us then since_us = tick_us - 1 end
if since_us > timestamp then since_us = timestamp end
local anchor = timestamp - since_us
local ticks = floor((at - anchor) / tick_us)
if ticks >= ceil((capacity - units) / tick_units) then
  units, anchor = capacity, at
else
  units, anchor = units + ticks * tick_units, anchor + ticks * tick_us
end
local used = capacity - units

--- move
-- A bucket that lacks less than one tick's refill may have been full for most of the current tick. The
-- elapsed part of that tick must not refill what is taken now, so a new tick starts with the charge. (A
-- tick of one microsecond ends in the moment in which it starts, so nothing changes for it.)
if after > used and used < tick_units then anchor = at end
units = capacity - after
tokens = floor(units / unit)
remainder = units - tokens * unit
timestamp, since_us = at, at - anchor
expires = anchor + ceil(after / tick_units) * tick_us

--- wait
fits_us = anchor + ceil((used - room) / tick_units) * tick_us

--- give
-- How much of a charge made at that time is returned: all of it if it was the key's last charge;
-- otherwise the part that cannot have been refilled since, whatever else was charged.
if made and charge > capacity then charge = capacity end
if made and timestamp ~= made then
  local ago_us = now > made and now - made or 0
  local full_us = ceil(capacity / tick_units) * tick_us
  local flowed = ago_us < full_us and ceil(ago_us / tick_us) * tick_units or charge
  charge = charge > flowed and charge - flowed or 0
end
