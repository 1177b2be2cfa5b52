-- The generic cell rate algorithm: a limiter that keeps a time instead of a count.
--
-- Source: ITU-T Recommendation I.371, "virtual scheduling algorithm". Each token is work that takes
-- one emission interval, one token after the other. The theoretical arrival time (TAT) is when all
-- admitted work will be done. `used` is the work still to do at a moment:
--
--      at                    TAT                     at + full_us
--       ├──────── used ────────┤───── what is left ──────┤
--
-- A token is a number of units of work; a refill tick does `tick_units` of them and lasts
-- `tick_us`, one microsecond for all but the largest numbers. What is used beyond the capacity is
-- owed; both together are at most `most`. At 3/s a tick does 3 units and a token is 1,000,000: one
-- token admitted at 0 is done after 333,333⅓ µs.
--
-- The state is the TAT rounded up to a whole tick; the `surplus`, the units by which that is too
-- much, here 333,334 · 3 - 1,000,000 = 2; and the `timestamp` at which the state was written.
--
-- The file is no script by itself: each section after a line `---` is pasted into scripts that read
-- the state, write it and answer. They set `now`, the `capacity` and all charges in units of work,
-- and `at`, the moment to decide at: `now`, unless a section moves it. `level` finds what is `used`
-- at that moment; `move` makes the state in which `after` units are used, and `expires`, when that
-- state stops mattering; `terms` lists what the record of a charge keeps; `give` reduces a `charge`
-- made at the time `made` to what a refund may return; `carry` keeps what another limit wrote
-- beyond this one's burst. README.md beside this file has the whole contract. gcra/step.rs in
-- ratelimit-core is the same algorithm in Rust, with the same names in the same order.

--- fresh
tat_us, surplus, timestamp = now, 0, now

--- valid
timestamp < 2^52

--- level
-- A time before the state's own counts as the state's.
if timestamp > at then at = timestamp end
-- A state written under a larger limit has at most this limit's whole burst and debt to do.
local recovery_us = ceil(most / tick_units) * tick_us
local latest_us, written_us, timestamp_us = timestamp + recovery_us, tat_us, timestamp
if tat_us > latest_us then tat_us, surplus = latest_us, 0 end
if surplus >= tick_units then surplus = tick_units - 1 end
local ticks, used = 0, 0
if tat_us > at then
  ticks = ceil((tat_us - at) / tick_us)
  -- The last tick of the most work may do more units than that work needs: at least those are
  -- surplus, or more than the most would be used.
  if tat_us + tick_us > latest_us then
    local rounded = recovery_us / tick_us * tick_units - most
    if surplus < rounded then surplus = rounded end
  end
  used = ticks * tick_units - surplus
else
  tat_us = at
end

--- move
-- Work counts as done at the end of each tick, so the current tick may have run out of work
-- already. The rest of that tick must not do the work of a new charge: a new tick begins with it.
-- (A tick of a microsecond ends in the moment it begins: there this changes nothing.)
if after > used and used > 0 and used < tick_units then
  tat_us, ticks = at + tick_us, 1
end
-- The TAT moves by the difference in ticks.
local ticks_after = ceil(after / tick_units)
tat_us = tat_us + (ticks_after - ticks) * tick_us
surplus = ticks_after * tick_units - after
timestamp = at
expires = tat_us

--- terms
-- The level that the charge leaves, and what a token is in time: so many microseconds of work,
-- divided by so many.
tat_us - at, cost_unit * tick_us, tick_units

--- give
-- A charge of a known time: all of it if nothing was charged since, otherwise less what can have
-- refilled since, so that settling never creates capacity.
if made and charge > most then charge = most end
local terms, counts = reservation and reservation.terms or { 0, 0, 0 }, reservation and reservation.counts or 0
local whole_us = terms[3] > 0 and floor(terms[2] / terms[3]) or 0
-- It is worth no more than it was when it was charged.
if made and terms[3] > 0 and not (terms[2] == cost_unit * tick_us and terms[3] == tick_units) then
  charge = math.min(charge, floor(charge / cost_unit * whole_us / tick_us) * tick_units)
end
if made and timestamp ~= made then
  local ago_us = now > made and now - made or 0
  -- What lay beyond the most that this limit holds is lost.
  local lost_us = terms[1] > recovery_us and terms[1] - recovery_us or 0
  local flowed = (ceil(ago_us / tick_us) + ceil(lost_us / tick_us)) * tick_units
  -- The state holds less than the charge, after a reset or an acquire of a limit that recovers
  -- sooner.
  local lowered = written_us + tick_us < made + counts * whole_us
  if lowered or ago_us >= recovery_us or flowed > charge then flowed = charge end
  charge = charge - flowed
end

--- carry
-- Another limit wrote more than this one can hold, and still counts it: its TAT moves by as much. A
-- refund keeps the time of the write: by a later one, the burst would be used again.
if written_us > latest_us and written_us > at then
  tat_us, surplus = math.min(written_us + (ticks_after - ticks) * tick_us, 2 ^ 53 - 1), 0
  if after < used then timestamp = timestamp_us end
  expires, gone = tat_us, tat_us <= at
end
