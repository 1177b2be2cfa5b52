-- The driver's operations on one check. They read and step; only driver.lua writes.

local operation, padding_ms, metadata = ARGV[1], tonumber(ARGV[3]), ARGV[4]
now = tonumber(ARGV[2])
if not now then
  local time = redis.call('TIME')
  now = time[1] * 1000000 + time[2]
  if now >= MOST then return redis.error_reply('RLTIME ' .. text(now)) end
end
-- Whether the operation is only tried, and writes nothing.
local tried = string.match(operation, '^try%-(.*)$')
operation = tried or operation
-- Whether the settled reservation is forgotten early: its id was drawn for one charge.
local once = operation == 'settle-once'
if once then operation = 'settle' end
-- How long it is remembered, in case that the settlement is sent again; `Reservation::REPEAT_US` in ratelimit-core.
local REPEAT_US = 10000000
local acquiring, settling = operation == 'acquire', operation == 'settle' or operation == 'renew'
-- Whether states from the future are looked for. `heal` cuts them.
local healing = operation == 'heal' or operation == 'ahead'
if operation == 'ahead' then operation = 'peek' end
-- The group of the batch's reservations.
local group = ARGV[5]
-- The index of the key that is being read.
local reading

-- Ends the batch with an error of this code; `more` follows the check's index.
local function refuse(code, more)
  error({ code = code, more = more })
end

-- Marks a reservation of one slot of several: the request that made it may take it back until another
-- caller learns that the id has it.
local RESERVED = ' ?'

-- When a reservation ends. A settled one that is forgotten early says so by a timestamp later than `since`.
local function ends(reservation, life_us)
  if reservation.settled_text and reservation.timestamp > reservation.since then return reservation.timestamp end
  return reservation.since + life_us
end

-- The reservation under the batch's id; nil if there is none or it has ended.
local function live_reservation(check)
  local stored = redis.call('GET', check.reservation_key)
  if not stored then return nil end
  local reserved = string.sub(stored, -#RESERVED) == RESERVED
  if reserved then stored = string.sub(stored, 1, -#RESERVED - 1) end
  local alone, its_group = string.match(stored, '^([ %d]-)( @%x+ [%w%-_.,]+)$')
  stored = alone or stored
  local timestamp, since, cost, settled = string.match(stored, '^(%d+) (%d+) (%d+) ?(%d*)$')
  timestamp, since = timestamp and integer(timestamp), since and integer(since)
  if not (timestamp and since) or (settled == '' and not integer(cost)) then error(CORRUPT) end
  local reservation = {
    timestamp = timestamp,
    since = since,
    cost_text = cost,
    cost = tonumber(cost),
    settled_text = settled ~= '' and settled or nil,
    reserved = reserved,
    group = its_group or '',
  }
  if now < ends(reservation, check.life_us) then return reservation end
end

-- What the batch's id means for a check: nil if it is new, 'done', 'unknown', or 'live' and the
-- reservation.
local function look_up(check)
  local reservation = check.reservation_key and live_reservation(check)
  if not reservation then return settling and 'unknown' or nil end
  if reservation.group ~= group then
    refuse('RLOTHERS', string.match(reservation.group, '^ @%x+ (.*)$') or '')
  end
  if reservation.settled_text then
    -- The same request again is how a client asks for a lost reply.
    local same = reservation.settled_text == check.cost_text
    if same and not acquiring and operation ~= 'renew' then return 'done' end
    refuse('RLSETTLED', reservation.settled_text)
  end
  if settling then return 'live', reservation end
  if operation ~= 'acquire' and operation ~= 'peek' then refuse('RLPENDING') end
  if reservation.cost_text ~= check.cost_text then refuse('RLRESERVED', reservation.cost_text) end
  return 'done', reservation
end

local function untouched(check, state)
  return check.algorithm.step(check.limit, state, now, 0)
end

-- Acquires, or computes what an acquire would decide.
local function step(check)
  local algorithm, limit, state, cost = check.algorithm, check.limit, check.state, check.cost
  local decision, kind, put, expires = algorithm.step(limit, state, now, cost)
  if decision.allowed or check.attempt == 0 then return decision, kind, put, expires end
  local fill, filled = algorithm.fill or refuse('RLUNSUPPORTED'), nil
  kind, put, expires, filled = fill(limit, state, now, math.min(cost, check.attempt), cost)
  -- The wait includes the charge of this very attempt.
  if kind == 'put' then state = put end
  return filled or algorithm.step(limit, state, now, cost), kind, put, expires
end

-- The wait of an admitted attempt in a denied batch: its own charge counts.
local function wait_us(check)
  if not check.decision.allowed then return check.decision.retry_after_us end
  local algorithm, limit, state, cost = check.algorithm, check.limit, check.state, check.cost
  if algorithm.wait_us then return algorithm.wait_us(limit, state, now, cost) end
  if check.write == 'put' then state = check.put end
  return algorithm.step(limit, state, now, cost).retry_after_us
end

-- Cuts a state that would hold its key for longer than a full limit does, as only one from the future does, to a full
-- limit as of now. The wait of the decision is by how much longer.
local function heal(check)
  local algorithm, limit = check.algorithm, check.limit
  local seen, capacity = untouched(check, check.state), untouched(check, nil).remaining
  local full, kind, put, expires = (algorithm.filled or algorithm.step)(limit, nil, now, capacity)
  seen.retry_after_us = math.max(seen.reset_after_us - full.reset_after_us, 0)
  if seen.retry_after_us > 0 then return seen, kind, put, expires end
  return seen
end

-- The result of the operation for a check whose id is new.
local function apply(check)
  if healing then return heal(check) end
  if operation == 'reset' then return untouched(check, nil), 'remove' end
  if operation == 'acquire' or operation == 'peek' then return step(check) end
  local apply_it = check.algorithm[operation] or refuse('RLUNSUPPORTED')
  return apply_it(check.limit, check.state, now, check.cost)
end

-- The result of the operation for an existing reservation.
local function settle(check, reservation)
  local algorithm = check.algorithm
  if operation == 'settle' then
    local settle_it = algorithm.settle or refuse('RLUNSUPPORTED')
    return settle_it(check.limit, check.state, now, reservation, check.cost)
  end
  if algorithm.renew then return algorithm.renew(check.limit, check.state, now, reservation) end
  return untouched(check, check.state)
end

local function read(check)
  if operation ~= 'reset' then return check.algorithm.read(check.key, check.field) end
  -- A reset does not have to understand the state.
  local done, found = pcall(check.algorithm.read, check.key, check.field)
  if done then return found end
  if found ~= CORRUPT then error(found, 0) end
end

-- Appends a decision to the reply.
local function reply(answer, decision)
  answer[#answer + 1] = decision.allowed and 1 or 0
  answer[#answer + 1] = decision.limit or -1
  answer[#answer + 1] = decision.remaining
  answer[#answer + 1] = decision.retry_after_us
  answer[#answer + 1] = decision.replenish_after_us
  answer[#answer + 1] = decision.reset_after_us
end
