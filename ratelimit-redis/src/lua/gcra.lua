-- The generic cell rate algorithm: a limiter that keeps a time instead of a count.
--
-- Every token is work that takes one emission interval; the theoretical arrival time (`tat_us`) is when
-- all admitted work will be done. A request fits if the work still to do (the `backlog`), with its
-- own added, is at most what the burst allows.
--
-- One token is `token_units` of work, `tick_units` are done at each refill tick, and a tick is
-- `tick_us` long: one microsecond for all but the largest numbers. The state is the tat, rounded up to
-- a whole tick; the `surplus` units by which that is too much; and the `tick` at which it was written.
-- At 3/s one token admitted at 0 is kept as a tat of 333334 with a surplus of 2 units.
--
-- The Rust twin, gcra.rs in ratelimit-core, has the same functions in the same order. All numbers
-- are integers below 2^53. From the prelude of every script come:
--   floor_div, ceil_div       exact division, rounded down or up
--   NEVER                     the wait for what never fits
--   MOST                      the largest that a count becomes
--   units_given_back(…)       what settling at less gives back to a bucket
--   around(total)             a running total, counted round and round below 2^52
--   numbers(name, fields)     a table with `read`, `put` and `remove` for a state of these numbers
--   number_pairs(name, …)     the same for a state of many pairs of numbers
--
-- An algorithm is a table with
--   parameters                the names of the limit's numbers, in the order in which they are sent
--   read, put, remove         of the state; `put` is given the caller's metadata as well
--   step, refund, force       (limit, state or nil, now, cost) -> decision [, change]
-- where the decision has `allowed`, `remaining`, `retry_after_us` and `reset_after_us`, and the change is
-- nothing, or 'remove', or 'put', the new state, and the time at which that stops to matter. And, where
-- charges can be held or attempts be charged, with
--   settle                    (limit, state or nil, now, hold, cost) -> decision [, change]
--   renew                     (limit, state or nil, now, hold) -> decision [, change]; else a peek
--   charged_at                (limit, state or nil, now) -> when a charge counts as made; else now
--   fill                      (limit, state or nil, now, charge, cost) -> change or nil [, decision]
--   wait_us                   (limit, state or nil, now, cost) -> how long until the cost fits once more, if it is
--                             charged now; else what `step` says of the new state
--   mark                      (state) -> where the newest charge went, as a number: while it is the same, a
--                             refund takes from there; needed where there is no `settle`
--   undo                      (limit, state or nil, now, mark, cost) -> decision [, change]; takes the cost
--                             from there also when others came later
-- where the hold has `tick` and `cost`. `fill` charges an attempt that does not fit as far as there is room. Its
-- decision is what a step of `cost` comes to after it, and left out where `step` can tell it from the new state.

local gcra = numbers('gcra', { 'tat_us', 'surplus', 'tick' })
gcra.parameters = { 'burst', 'token_units', 'tick_units', 'tick_us' }

local function capacity_units(limit)
  return limit.burst * limit.token_units
end

local function level(limit, state, now)
  if not state then return { at = now, tat_us = now, ticks = 0, backlog = 0 } end
  -- A time before the state's own counts as the state's.
  local at = math.max(now, state.tick)
  -- A state written under a larger limit owes no more than this limit's whole burst.
  local full_ticks = ceil_div(capacity_units(limit), limit.tick_units)
  local latest_us = state.tick + full_ticks * limit.tick_us
  local tat_us = math.min(state.tat_us, latest_us)
  if tat_us <= at then return { at = at, tat_us = at, ticks = 0, backlog = 0 } end
  local ticks = ceil_div(tat_us - at, limit.tick_us)
  local surplus = math.min(state.surplus, limit.tick_units - 1)
  -- It would owe more than the burst by what its ticks are rounded up.
  if tat_us + limit.tick_us > latest_us then
    local rounded = full_ticks * limit.tick_units - capacity_units(limit)
    surplus = state.tat_us > latest_us and rounded or math.max(surplus, rounded)
  end
  return { at = at, tat_us = tat_us, ticks = ticks, backlog = ticks * limit.tick_units - surplus }
end

-- The level that a charge up to this backlog starts from.
--
-- Work is counted as done at the end of each tick, so a tick under way may have run out of work
-- already: with 2 units to do in a tick that does 385, the bucket has been full for most of it. A
-- charge now must not be worked off by the part of the tick that is over, so a new tick begins with
-- it. (Ticks of a microsecond end with the moment they begin in: there this changes nothing.)
local function before_charge(limit, now_level, backlog)
  local charged = backlog > now_level.backlog
  if not charged or now_level.backlog == 0 or now_level.backlog >= limit.tick_units then
    return now_level
  end
  return {
    at = now_level.at, tat_us = now_level.at + limit.tick_us, ticks = 1, backlog = now_level.backlog,
  }
end

-- When this backlog will be done: a whole number of ticks before or after the tat of the level, at
-- which the level's own `ticks` will have done its backlog. Not for a backlog of 0, which is done
-- already.
local function tat_us(limit, now_level, backlog)
  local ticks = ceil_div(backlog, limit.tick_units) - now_level.ticks
  return now_level.tat_us + ticks * limit.tick_us
end

local function decision(limit, now, now_level, retry_us)
  local left = capacity_units(limit) - now_level.backlog
  local reset_us = now_level.backlog == 0 and 0 or tat_us(limit, now_level, now_level.backlog)
  return {
    allowed = retry_us == 0,
    remaining = floor_div(left, limit.token_units),
    retry_after_us = retry_us,
    reset_after_us = math.max(reset_us - now, 0),
  }
end

-- The step to another backlog: of a charge, a refund, or nothing.
local function moved_to(limit, now, now_level, backlog)
  local after = {
    at = now_level.at, tat_us = now_level.tat_us, ticks = now_level.ticks, backlog = backlog,
  }
  local answer = decision(limit, now, after, 0)
  if backlog == now_level.backlog then return answer end
  if backlog == 0 then return answer, 'remove' end
  local tat = tat_us(limit, now_level, backlog)
  local surplus = ceil_div(backlog, limit.tick_units) * limit.tick_units - backlog
  return answer, 'put', { tat_us = tat, surplus = surplus, tick = now_level.at }, tat
end

function gcra.step(limit, state, now, cost)
  local now_level = level(limit, state, now)
  if cost > limit.burst then return decision(limit, now, now_level, NEVER) end
  local backlog = now_level.backlog + cost * limit.token_units
  local excess = backlog - capacity_units(limit)
  if excess > 0 then
    -- It fits as soon as the excess has been worked off.
    return decision(limit, now, now_level, tat_us(limit, now_level, excess) - now)
  end
  return moved_to(limit, now, before_charge(limit, now_level, backlog), backlog)
end

function gcra.refund(limit, state, now, cost)
  local now_level = level(limit, state, now)
  local units = math.min(cost, limit.burst) * limit.token_units
  return moved_to(limit, now, now_level, math.max(now_level.backlog - units, 0))
end

function gcra.force(limit, state, now, cost)
  local now_level = level(limit, state, now)
  local units = math.min(cost, limit.burst) * limit.token_units
  local backlog = math.min(now_level.backlog + units, capacity_units(limit))
  return moved_to(limit, now, before_charge(limit, now_level, backlog), backlog)
end

-- When a charge counts as made: at the time of the last one, if that is later.
function gcra.charged_at(_, state, now)
  return state and math.max(now, state.tick) or now
end

-- Charges what is missing. Gives back what is too much, if nothing was charged since; otherwise as much
-- of it as cannot have flowed back by itself since, so that settling never mints.
function gcra.settle(limit, state, now, hold, cost)
  if cost >= hold.cost then return gcra.force(limit, state, now, cost - hold.cost) end
  local now_level = level(limit, state, now)
  local units = units_given_back(limit, hold, cost, now, state)
  return moved_to(limit, now, now_level, math.max(now_level.backlog - units, 0))
end

-- Charges a request that does not fit as far as there is room.
function gcra.fill(limit, state, now, charge)
  return select(2, gcra.force(limit, state, now, charge))
end

return gcra
