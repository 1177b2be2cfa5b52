-- The generic cell rate algorithm: a limiter that keeps a time instead of a count.
--
-- Every token is work that takes one emission interval; the theoretical arrival time (`tat_us`) is when
-- all admitted work will be done. What is `used` of a limit is the work still to do at a moment:
--
--      at                     tat_us                 at + full_us
--       ├──────── used ─────────┤──── what is left ────┤
--
-- One token is `unit` units of work, a refill tick does `tick_units` of them, and lasts `tick_us`: one
-- microsecond for all but the largest numbers. An empty bucket refills in `full_us`. At 3/s, a tick does 3
-- units and a token is 1,000,000: one token that is admitted at 0 is done after 333,333⅓ µs.
--
-- The state is the tat, rounded up to a whole tick; the `surplus` units by which that is too much, here
-- 333,334 · 3 - 1,000,000 = 2; and the `tick` at which it was written.
--
-- The file is no script by itself: each section after a line `---` is pasted into scripts that read the state,
-- write it and answer. These set `now`, the `capacity` and all charges in units of work, and `at`, the moment
-- at which to decide: `now`, unless a section moves it. `level` finds what is `used` at that moment; `move`
-- makes the state in which `after` units are used, and `expires`, when that state stops to matter; `wait` finds
-- when at most `room` units will be used; `give` reduces a `charge` made at the time `made` to what a refund
-- may return. README.md beside this file has the whole contract. The Rust twin is gcra.rs in ratelimit-core.

--- fresh
tat_us, surplus, tick = now, 0, now

--- valid
tick < 2^52

--- level
-- A time before the state's own counts as the state's.
if tick > at then at = tick end
-- A state written under a larger limit owes no more than this limit's whole burst.
local latest_us = tick + full_us
local owed_more = tat_us > latest_us
if owed_more then tat_us = latest_us end
local ticks, used = 0, 0
if tat_us > at then
  ticks = ceil((tat_us - at) / tick_us)
  if surplus >= tick_units then surplus = tick_units - 1 end
  -- The last tick of a whole burst may have more units than the burst needs: no less is surplus, or more than
  -- the capacity would be used.
  if tat_us + tick_us > latest_us then
    local rounded = full_us / tick_us * tick_units - capacity
    if owed_more or surplus < rounded then surplus = rounded end
  end
  used = ticks * tick_units - surplus
else
  tat_us = at
end

--- move
-- Work is counted as done at the end of each tick, so a tick under way may have run out of work already.
-- A charge must not be worked off by the part of the tick that is over: a new tick begins with it. (Ticks of
-- a microsecond end with the moment they begin in: there this changes nothing.)
if after > used and used > 0 and used < tick_units then
  tat_us, ticks = at + tick_us, 1
end
-- The tat moves by the ticks that the work takes more, or less, than before.
local ticks_after = ceil(after / tick_units)
tat_us = tat_us + (ticks_after - ticks) * tick_us
surplus = ticks_after * tick_units - after
tick = at
expires = tat_us

--- wait
fits_us = tat_us + (ceil((used - room) / tick_units) - ticks) * tick_us

--- give
-- Of a charge that was made then: all of it if the key was charged last when this was; otherwise what cannot
-- have flowed back since, whatever else was charged.
if made and charge > capacity then charge = capacity end
if made and tick ~= made then
  local ago_us = now > made and now - made or 0
  local flowed = ago_us < full_us and ceil(ago_us / tick_us) * tick_units or charge
  charge = charge > flowed and charge - flowed or 0
end
