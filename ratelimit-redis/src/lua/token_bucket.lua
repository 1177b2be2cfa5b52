-- The token bucket: tokens flow in at a steady rate, requests take them out.
--
-- One token is `token_units`, `tick_units` flow in at each refill tick, and a tick is `tick_us`
-- long. The state is the whole `tokens`, the `remainder` of units beyond them, the `tick` at which it
-- was written, and how long before that units flowed in last, `since_us`. The Rust twin is
-- token_bucket.rs in ratelimit-core; what an algorithm here is made of, and where `numbers`, `floor_div`
-- and the like come from, stands at the head of gcra.lua.

local token_bucket = numbers('token-bucket', { 'tokens', 'remainder', 'tick', 'since_us' })
token_bucket.parameters = { 'burst', 'token_units', 'tick_units', 'tick_us' }

local function capacity_units(limit)
  return limit.burst * limit.token_units
end

local function level(limit, state, now)
  local capacity = capacity_units(limit)
  if not state then return { at = now, anchor = now, units = capacity } end
  -- A time before the state's own counts as the state's.
  local at = math.max(now, state.tick)
  -- A state written under a larger limit holds no more than this one's burst.
  local kept = math.min(state.tokens, limit.burst) * limit.token_units
    + math.min(state.remainder, limit.token_units - 1)
  local units = math.min(kept, capacity)
  local since_us = math.min(state.since_us, limit.tick_us - 1, state.tick)
  local anchor = state.tick - since_us
  local ticks = floor_div(at - anchor, limit.tick_us)
  if ticks >= ceil_div(capacity - units, limit.tick_units) then
    return { at = at, anchor = at, units = capacity }
  end
  return {
    at = at,
    anchor = anchor + ticks * limit.tick_us,
    units = units + ticks * limit.tick_units,
  }
end

-- The level that a charge down to these units starts from.
--
-- Units flow in at the end of each tick, so a bucket that lacks less than a tick's flow may have been
-- full for most of the tick under way. What a charge takes out now must not be made good by the part
-- of the tick that is over, so a new tick begins with it. (Ticks of a microsecond end with the moment
-- they begin in: there this changes nothing.)
local function before_charge(limit, now_level, units)
  local charged = units < now_level.units
  if not charged or capacity_units(limit) - now_level.units >= limit.tick_units then
    return now_level
  end
  return { at = now_level.at, anchor = now_level.at, units = now_level.units }
end

-- When so many units more will have flowed in, at the earliest refill tick that gets there.
local function refilled_us(limit, now_level, missing)
  return now_level.anchor + ceil_div(missing, limit.tick_units) * limit.tick_us
end

local function decision(limit, now, now_level, retry_us)
  local missing = capacity_units(limit) - now_level.units
  local reset_us = missing == 0 and 0 or refilled_us(limit, now_level, missing)
  return {
    allowed = retry_us == 0,
    remaining = floor_div(now_level.units, limit.token_units),
    retry_after_us = retry_us,
    reset_after_us = math.max(reset_us - now, 0),
  }
end

-- The step to other units: of a charge, a refund, or nothing.
local function moved_to(limit, now, now_level, units)
  local after = { at = now_level.at, anchor = now_level.anchor, units = units }
  local answer = decision(limit, now, after, 0)
  local missing = capacity_units(limit) - units
  if units == now_level.units then return answer end
  if missing == 0 then return answer, 'remove' end
  local state = {
    tokens = floor_div(units, limit.token_units),
    remainder = math.fmod(units, limit.token_units),
    tick = now_level.at,
    since_us = now_level.at - now_level.anchor,
  }
  return answer, 'put', state, refilled_us(limit, now_level, missing)
end

function token_bucket.step(limit, state, now, cost)
  local now_level = level(limit, state, now)
  if cost > limit.burst then return decision(limit, now, now_level, NEVER) end
  local wanted = cost * limit.token_units
  if wanted > now_level.units then
    local retry_us = refilled_us(limit, now_level, wanted - now_level.units) - now
    return decision(limit, now, now_level, retry_us)
  end
  local units = now_level.units - wanted
  return moved_to(limit, now, before_charge(limit, now_level, units), units)
end

function token_bucket.refund(limit, state, now, cost)
  local now_level = level(limit, state, now)
  local given = math.min(cost, limit.burst) * limit.token_units
  local units = math.min(now_level.units + given, capacity_units(limit))
  return moved_to(limit, now, now_level, units)
end

function token_bucket.force(limit, state, now, cost)
  local now_level = level(limit, state, now)
  local wanted = math.min(cost, limit.burst) * limit.token_units
  local units = math.max(now_level.units - wanted, 0)
  return moved_to(limit, now, before_charge(limit, now_level, units), units)
end

-- When a charge counts as made: at the time of the last one, if that is later.
function token_bucket.charged_at(_, state, now)
  return state and math.max(now, state.tick) or now
end

-- Charges what is missing. Gives back what is too much, if nothing was charged since; otherwise as much
-- of it as cannot have flowed back by itself since, so that settling never mints.
function token_bucket.settle(limit, state, now, hold, cost)
  if cost >= hold.cost then return token_bucket.force(limit, state, now, cost - hold.cost) end
  local now_level = level(limit, state, now)
  local units = units_given_back(limit, hold, cost, now, state)
  units = math.min(now_level.units + units, capacity_units(limit))
  return moved_to(limit, now, now_level, units)
end

-- Charges a request that does not fit as far as there is room.
function token_bucket.fill(limit, state, now, charge)
  return select(2, token_bucket.force(limit, state, now, charge))
end

return token_bucket
