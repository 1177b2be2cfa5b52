-- The token bucket: tokens refill at a steady rate, and requests take them. One token is `unit` units.
-- Each refill tick adds `tick_units`, and a tick lasts `tick_us`: one microsecond for all but the
-- largest numbers. `used` is what the bucket lacks.
--
-- The state is the whole `tokens`, the `remainder` in units, the `timestamp` at which it was
-- written, and `full_at_us`, when the bucket will be full: the TAT of gcra.lua, by which it decides
-- alike.
--
-- The Rust twins are token_bucket.rs and work.rs in ratelimit-core. README.md beside this file
-- specifies what each section receives and what it leaves.

--- fresh
tokens, remainder, timestamp, full_at_us = capacity / unit, 0, now, now

--- valid
timestamp < 2^52

--- level
-- A time before the state counts as the state's time.
if timestamp > at then at = timestamp end
-- A state written under a larger limit owes at most this limit's whole burst.
local full_us = ceil(capacity / tick_units) * tick_us
local latest_us, written_us, timestamp_us = timestamp + full_us, full_at_us, timestamp
local ticks, used = 0, 0
if full_at_us > at then
  -- The units by which a whole tick is too much, from the tokens. Of another limit these say nothing.
  if remainder >= unit then remainder = unit - 1 end
  local missing = capacity - tokens * unit - remainder
  local surplus = ceil((full_at_us - timestamp) / tick_us) * tick_units - missing
  if surplus < 0 or surplus >= tick_units or missing < 0 then surplus = 0 end
  if full_at_us > latest_us then full_at_us, surplus = latest_us, 0 end
  if full_at_us > at then
    ticks = ceil((full_at_us - at) / tick_us)
    -- The last tick of a whole burst may add more units than the burst needs.
    if full_at_us + tick_us > latest_us then
      local rounded = full_us / tick_us * tick_units - capacity
      if surplus < rounded then surplus = rounded end
    end
    used = ticks * tick_units - surplus
  end
end
if full_at_us < at then full_at_us = at end

--- move
-- A bucket that lacks less than one tick's refill may have been full for most of the current tick. The
-- elapsed part of that tick must not refill what is taken now, so a new tick starts with the charge. (A
-- tick of one microsecond ends in the moment in which it starts, so nothing changes for it.)
if after > used and used > 0 and used < tick_units then
  full_at_us, ticks = at + tick_us, 1
end
local ticks_after = ceil(after / tick_units)
full_at_us = full_at_us + (ticks_after - ticks) * tick_us
local units = capacity - after
tokens = floor(units / unit)
remainder = units - tokens * unit
timestamp = at
expires = full_at_us

--- wait
fits_us = full_at_us + (ceil((used - room) / tick_units) - ticks) * tick_us

--- carry
-- Another limit wrote more than this one can hold, and still counts it: as in gcra.lua.
if written_us > latest_us and written_us > at then
  full_at_us = written_us + (ticks_after - ticks) * tick_us
  if after < used then timestamp = timestamp_us end
  units = capacity - ceil((full_at_us - timestamp) / tick_us) * tick_units
  if units < 0 then units = 0 end
  tokens = floor(units / unit)
  remainder = units - tokens * unit
  expires, gone = full_at_us, full_at_us <= at
end

--- give
-- How much of a charge made at that time is returned: all of it if it was the key's last charge;
-- otherwise the part that cannot have been refilled since, whatever else was charged.
if made and charge > capacity then charge = capacity end
if made and timestamp ~= made then
  local ago_us = now > made and now - made or 0
  local flowed = ago_us < full_us and ceil(ago_us / tick_us) * tick_units or charge
  charge = charge > flowed and charge - flowed or 0
end
