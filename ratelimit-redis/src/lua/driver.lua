-- Decides a batch, all or nothing: the Lua twin of `decide` in ratelimit-core. It reads and steps
-- everything first and writes last, so a script that fails has written nothing.
--
--     KEYS: the keys of the batch, each once.
--     ARGV: the operation; the time in µs, or '' for the server's; the padding in ms; the caller's metadata; the
--           index in KEYS of the reply cache (0 for none) and its life in ms; the text that ends a reservation (its
--           group; empty for one check).
--           Then per check: the algorithm; the index of its key; the field; the cost; the most that a denied attempt
--           is charged (0 if only admitted requests are charged); the index in KEYS of the reservation under the
--           batch's id (0 without an id); its life in µs; the algorithm's parameters; and for 'undo' what 'reserve'
--           returned. A stack of limits is one check per limit.
--
-- Cross-slot batches run a script per slot: 'ask' reports what an acquire would decide, 'reserve'
-- acquires, and 'undo' gives back what 'reserve' charged if another slot denied. 'attempt' is an acquire
-- of a batch that another slot has denied. 'show' is a peek that replies like 'ask'. 'try-settle' and
-- the like report whether that operation is refused, and write nothing.
--
-- Returns six integers per check: allowed (0 or 1), the limit (-1 for the algorithm's capacity), remaining,
-- retry after (µs, -1 for never), replenish after (µs), reset after (µs). 'ask' and 'show' add six more, for the
-- case that another check denies. 'reserve' adds four more: whether anything was written (0 or 1), the
-- time at which the charge counts as made (µs), its mark, and the wait if another slot denies. 'undo'
-- adds one more: whether anything was given back.
--
-- Or an error: RLCORRUPT or RLWRONGTYPE with the indices of check and key; RLPART and the server's
-- error, if something was written before it; RLSETTLED or RLHELD with the index of the check and the
-- settled or reserved cost; RLPENDING or RLUNSUPPORTED with the index of the check; or RLUNKNOWN.

local operation, now, padding_ms, metadata = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3]), ARGV[4]
if not now then
  local time = redis.call('TIME')
  now = time[1] * 1000000 + time[2]
end
local tried = string.match(operation, '^try%-(.*)$')
operation = tried or operation
local only_looks = tried or operation == 'peek' or operation == 'show'
local asking, reserving = operation == 'ask' or operation == 'show', operation == 'reserve'
local acquiring = operation == 'acquire' or operation == 'ask' or reserving
if asking then operation = 'peek' end
if reserving then operation = 'acquire' end
local all_allowed = operation ~= 'attempt'
if not all_allowed then operation, acquiring = 'acquire', true end

-- The reply is cached for a client that may repeat its request, and returned again.
local remembered = operation ~= 'peek' and not tried and KEYS[tonumber(ARGV[5])]
if remembered then
  local answered = redis.call('GET', remembered)
  if answered then
    local answer = {}
    for number in string.gmatch(answered, '%S+') do answer[#answer + 1] = tonumber(number) end
    return answer
  end
end

local settling = operation == 'settle' or operation == 'renew'

local group = ARGV[7]
local checks, next_arg = {}, 8
while ARGV[next_arg] do
  local algorithm = algorithms[ARGV[next_arg]]
  local check = {
    algorithm = algorithm,
    place = tonumber(ARGV[next_arg + 1]),
    field = ARGV[next_arg + 2],
    -- Costs are compared as text, because the largest have no exact number. Calculations use a number.
    cost_text = ARGV[next_arg + 3],
    cost = math.min(tonumber(ARGV[next_arg + 3]), 9007199254740991),
    attempt = tonumber(ARGV[next_arg + 4]),
    hold_place = tonumber(ARGV[next_arg + 5]),
    life_us = tonumber(ARGV[next_arg + 6]),
    limit = {},
  }
  check.key, check.hold_key = KEYS[check.place], KEYS[check.hold_place]
  next_arg = next_arg + 7
  for _, name in ipairs(algorithm.parameters) do
    check.limit[name] = tonumber(ARGV[next_arg])
    next_arg = next_arg + 1
  end
  if operation == 'undo' then
    check.at, check.mark = tonumber(ARGV[next_arg]), tonumber(ARGV[next_arg + 1])
    next_arg = next_arg + 2
  end
  checks[#checks + 1] = check
end

-- Ends the batch with an error of this code; `more` follows the check's index.
local function refuse(code, more)
  error({ code = code, more = more })
end

-- Marks a reservation of one slot of several: the request that made it may take it back until another
-- caller is told that the id has it.
local RESERVED = ' ?'

-- The reservation under the batch's id; nil if there is none or it has ended.
local function live_hold(check)
  local stored = redis.call('GET', check.hold_key)
  if not stored then return nil end
  local reserved = string.sub(stored, -#RESERVED) == RESERVED
  if reserved then stored = string.sub(stored, 1, -#RESERVED - 1) end
  local alone, its_group = string.match(stored, '^([ %d]-)( @%x+ [%w%-_.,]+)$')
  stored = alone or stored
  local tick, since, cost, settled = string.match(stored, '^(%d+) (%d+) (%d+) ?(%d*)$')
  tick, since = tick and integer(tick), since and integer(since)
  if not (tick and since) or (settled == '' and not integer(cost)) then error(CORRUPT) end
  if math.max(now - since, 0) >= check.life_us then return nil end
  return {
    tick = tick,
    since = since,
    cost_text = cost,
    cost = tonumber(cost),
    settled_text = settled ~= '' and settled or nil,
    reserved = reserved,
    group = its_group or '',
  }
end

-- What the batch's id means for a check: nil if it is new, 'done', 'unknown', or 'held' and the
-- reservation.
local function named(check)
  local hold = check.hold_key and live_hold(check)
  if not hold then return settling and 'unknown' or nil end
  if hold.group ~= group then
    refuse('RLOTHERS', string.match(hold.group, '^ @%x+ (.*)$') or '')
  end
  if hold.settled_text then
    -- The same request again is how a client asks for a lost reply.
    local same = hold.settled_text == check.cost_text
    if same and not acquiring and operation ~= 'renew' then return 'done' end
    refuse('RLSETTLED', hold.settled_text)
  end
  if settling then return 'held', hold end
  if operation ~= 'acquire' and operation ~= 'peek' then refuse('RLPENDING') end
  if hold.cost_text ~= check.cost_text then refuse('RLHELD', hold.cost_text) end
  return 'done', hold
end

local function untouched(check, state)
  return check.algorithm.step(check.limit, state, now, 0)
end

-- Acquires, or computes what an acquire would decide.
local function step(check)
  local algorithm, limit, state, cost = check.algorithm, check.limit, check.state, check.cost
  local decision, kind, put, expires = algorithm.step(limit, state, now, cost)
  if decision.allowed or check.attempt == 0 then return decision, kind, put, expires end
  local fill, told = algorithm.fill or refuse('RLUNSUPPORTED'), nil
  kind, put, expires, told = fill(limit, state, now, math.min(cost, check.attempt), cost)
  -- The wait includes the charge of this very attempt.
  if kind == 'put' then state = put end
  return told or algorithm.step(limit, state, now, cost), kind, put, expires
end

-- The wait of an admitted attempt in a denied batch: its own charge counts.
local function wait_us(check)
  if not check.decision.allowed then return check.decision.retry_after_us end
  local algorithm, limit, state, cost = check.algorithm, check.limit, check.state, check.cost
  if algorithm.wait_us then return algorithm.wait_us(limit, state, now, cost) end
  if check.write == 'put' then state = check.put end
  return algorithm.step(limit, state, now, cost).retry_after_us
end

-- The result of the operation for a check whose id is new.
local function apply(check)
  if operation == 'reset' then return untouched(check, nil), 'remove' end
  if operation == 'acquire' or operation == 'peek' then return step(check) end
  local apply_it = check.algorithm[operation] or refuse('RLUNSUPPORTED')
  return apply_it(check.limit, check.state, now, check.cost)
end

-- The result of the operation for an existing reservation.
local function settle(check, hold)
  local algorithm = check.algorithm
  if operation == 'settle' then
    local settle_it = algorithm.settle or refuse('RLUNSUPPORTED')
    return settle_it(check.limit, check.state, now, hold, check.cost)
  end
  if algorithm.renew then return algorithm.renew(check.limit, check.state, now, hold) end
  return untouched(check, check.state)
end

-- Identifies where a charge went, so a refund takes it from there; -1 if the algorithm needs no mark.
local function mark(check, state)
  local of_state = check.algorithm.mark
  return of_state and state and of_state(state) or -1
end

-- Returns a reserved charge, or nothing if that might return another caller's charge.
local function undo(check)
  local algorithm, limit, state = check.algorithm, check.limit, check.state
  if algorithm.settle then
    local hold = { tick = check.at, since = check.at, cost = check.cost }
    return algorithm.settle(limit, state, now, hold, 0)
  end
  if algorithm.undo then return algorithm.undo(limit, state, now, check.mark, check.cost) end
  if not algorithm.refund then return untouched(check, state) end
  local same = state and algorithm.mark and algorithm.mark(state) == check.mark
  return algorithm.refund(limit, state, now, same and check.cost or 0)
end

local function read(check)
  if operation ~= 'reset' then return check.algorithm.read(check.key, check.field) end
  -- A reset does not have to understand the state.
  local done, found = pcall(check.algorithm.read, check.key, check.field)
  if done then return found end
  if found ~= CORRUPT then error(found, 0) end
end

-- Reading and stepping write nothing. A value that no limit wrote is removed, so the limit recovers and
-- the error is reported once; a read-only operation leaves it.
local known, reading, new_holds = not settling, nil, {}
local function read_and_step(check)
  if operation == 'undo' then
    reading = check.hold_place
    if check.hold_key then
      local at = text(check.at)
      local own = at .. ' ' .. at .. ' ' .. check.cost_text .. group .. RESERVED
      check.is_others = redis.call('GET', check.hold_key) ~= own
    end
    reading = check.place
    check.state = read(check)
    if check.is_others then
      check.decision = untouched(check, check.state)
      return
    end
    check.decision, check.write, check.put, check.expires = undo(check)
    return
  end
  reading = check.hold_place
  local name, hold = named(check)
  known = known or name ~= 'unknown'
  reading = check.place
  check.state = read(check)
  local charged_at = check.algorithm.charged_at
  local at = charged_at and charged_at(check.limit, check.state, now) or now
  check.at = at
  if name == 'done' or name == 'unknown' then
    check.decision = untouched(check, check.state)
    if hold and hold.reserved then
      -- From now on a caller relies on it.
      hold.reserved, check.hold = false, hold
    end
  elseif name == 'held' then
    check.decision, check.write, check.put, check.expires = settle(check, hold)
    if operation == 'settle' then
      hold.settled_text = check.cost_text
    else
      -- A charge that did not move only lives longer.
      if check.write == 'put' then hold.tick = at end
      hold.since, hold.reserved = math.max(at, hold.since), false
    end
    check.hold = hold
  else
    check.decision, check.write, check.put, check.expires = apply(check)
    -- An acquired charge awaits its settlement; every other operation settles at once.
    local settled_text = operation ~= 'acquire' and check.cost_text or nil
    check.hold = {
      tick = at,
      since = at,
      cost_text = check.cost_text,
      settled_text = settled_text,
      reserved = reserving,
      group = group,
    }
    -- The limits of a stack share a reservation, which counts as made at the latest of their times.
    local latest = new_holds[check.hold_key]
    if check.hold_key and latest then
      latest.tick, latest.since = math.max(latest.tick, at), math.max(latest.since, at)
      check.hold = latest
    elseif check.hold_key then
      new_holds[check.hold_key] = check.hold
    end
  end
end

-- The server's own error, such as WRONGTYPE: with its code in front, as outside of a pcall.
local function said(problem)
  local told = type(problem) == 'table' and problem.err or tostring(problem)
  return string.match(told, '%u%u+ .*') or 'ERR ' .. told
end

for position, check in ipairs(checks) do
  local done, problem = pcall(read_and_step, check)
  if problem == CORRUPT then
    if not only_looks then
      if reading == check.place then
        check.algorithm.remove(check.key, check.field)
      else
        redis.call('DEL', check.hold_key)
      end
    end
    return redis.error_reply('RLCORRUPT ' .. position .. ' ' .. reading)
  end
  if not done and type(problem) == 'table' and problem.code then
    return redis.error_reply(problem.code .. ' ' .. position .. ' ' .. (problem.more or ''))
  end
  if not done then
    local told = said(problem)
    if string.match(told, '^WRONGTYPE') then told = 'RLWRONGTYPE ' .. position .. ' ' .. reading end
    return redis.error_reply(told)
  end
  all_allowed = all_allowed and check.decision.allowed
end
if not known then return redis.error_reply('RLUNKNOWN nothing is held') end

local function ttl_ms(expires)
  return math.max(ceil_div(math.max(expires - now, 0), 1000), 1) + padding_ms
end

local function put_hold(check, hold)
  local stored = text(hold.tick) .. ' ' .. text(hold.since) .. ' ' .. hold.cost_text
  if hold.settled_text then stored = stored .. ' ' .. hold.settled_text end
  stored = stored .. hold.group
  if hold.reserved and not hold.settled_text then stored = stored .. RESERVED end
  redis.call('SET', check.hold_key, stored, 'PX', text(ttl_ms(hold.since + check.life_us)))
end

local function tell(answer, decision)
  answer[#answer + 1] = decision.allowed and 1 or 0
  answer[#answer + 1] = decision.limit or -1
  answer[#answer + 1] = decision.remaining
  answer[#answer + 1] = decision.retry_after_us
  answer[#answer + 1] = decision.replenish_after_us
  answer[#answer + 1] = decision.reset_after_us
end

if tried then return {} end

-- Write, or else let the checks that would have admitted show their state without the charge.
local answer, writing, wrote = {}, nil, false
local function write_and_tell(check)
  local decision, counts = check.decision, check.attempt > 0
  local charged = all_allowed or counts
  if not (all_allowed or asking) then
    if counts then
      decision.retry_after_us = wait_us(check)
    elseif decision.allowed then
      decision = untouched(check, check.state)
    end
  end
  local denied_wait_us = (asking or reserving) and counts and wait_us(check)
  if charged and operation ~= 'peek' then
    if check.write == 'put' then
      check.algorithm.put(check.key, check.field, check.put, ttl_ms(check.expires), metadata)
    elseif check.write == 'remove' then
      check.algorithm.remove(check.key, check.field)
    end
    if check.hold_key and check.hold then put_hold(check, check.hold) end
    if check.hold_key and operation == 'undo' and not check.is_others then
      redis.call('DEL', check.hold_key)
    end
    wrote = wrote or check.write ~= nil
  end
  tell(answer, decision)
  if asking and counts then
    decision.retry_after_us = denied_wait_us
    tell(answer, decision)
  elseif asking then
    tell(answer, decision.allowed and untouched(check, check.state) or decision)
  end
  if reserving then
    local written = charged and check.write
    answer[#answer + 1] = written and 1 or 0
    answer[#answer + 1] = check.at
    answer[#answer + 1] = mark(check, written and read(check))
    answer[#answer + 1] = denied_wait_us or decision.retry_after_us
  end
  if operation == 'undo' then answer[#answer + 1] = check.write and 1 or 0 end
end

local done, problem = pcall(function()
  for _, check in ipairs(checks) do
    writing = check
    write_and_tell(check)
  end
end)
if not done then
  -- If the server refuses a command after others, for example one that the user may not call, the
  -- earlier writes remain.
  local told = said(problem)
  local seen, shown = pcall(function() return untouched(writing, read(writing)) end)
  local before = untouched(writing, writing.state)
  local changed = not seen or writing.algorithm.own_key or shown.remaining ~= before.remaining
  if wrote or (changed and not string.match(told, '^OOM')) then told = 'RLPART ' .. told end
  return redis.error_reply(told)
end

if remembered then
  local words = {}
  for i, number in ipairs(answer) do words[i] = text(number) end
  redis.call('SET', remembered, table.concat(words, ' '), 'PX', ARGV[6])
end
return answer
