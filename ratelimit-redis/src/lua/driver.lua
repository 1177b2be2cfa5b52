-- Decides a batch, all or nothing: the Lua twin of `decide` in ratelimit-core. It reads and steps
-- everything first and writes last, so a script that fails has written nothing.
--
--     KEYS: the keys of the batch, each once.
--     ARGV: the operation ('settle-once' for an id that was drawn for one charge); the time in µs, or ''
--           for the server's; the padding in ms; the caller's metadata; the text that ends a reservation (its group;
--           empty for one check).
--           Then per check: the algorithm; the index of its key; the field; the cost; the most that a denied attempt
--           is charged (0 if only admitted requests are charged); the index in KEYS of the reservation under the
--           batch's id (0 without an id); its life in µs; the algorithm's parameters; and for 'undo' what 'reserve'
--           returned. A stack of limits is one check per limit.
--
-- checks.lua has the operations on one check, and cross_slot.lua those of a batch across slots. 'try-settle'
-- and the like report whether that operation is refused, and write nothing. 'heal' cuts states from the future,
-- and 'ahead' only finds them: the wait in the reply is by how much longer a state would hold its key than a full limit.
--
-- Returns six integers per check: allowed (0 or 1), the limit (-1 for the algorithm's capacity), remaining,
-- retry after (µs, -1 for never), replenish after (µs, 0 for never), reset after (µs). cross_slot.lua says which operations add more.
--
-- Or an error: RLCORRUPT or RLWRONGTYPE with the indices of check and key; RLPART and the server's
-- error, if something was written before it; RLSETTLED or RLRESERVED with the index of the check and the
-- settled or reserved cost; RLPENDING or RLUNSUPPORTED with the index of the check; RLOTHERS with the index
-- of the check and the limits that were reserved; RLUNKNOWN; or RLTIME with a time of the server at which nothing is decided.

local only_looks = tried or (operation == 'peek' and not acquiring)
local all_allowed = not protocol.denied

local checks, next_arg = {}, 6
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
    reservation_place = tonumber(ARGV[next_arg + 5]),
    life_us = tonumber(ARGV[next_arg + 6]),
    limit = {},
  }
  check.key, check.reservation_key = KEYS[check.place], KEYS[check.reservation_place]
  next_arg = next_arg + 7
  for _, name in ipairs(algorithm.parameters) do
    check.limit[name] = tonumber(ARGV[next_arg])
    next_arg = next_arg + 1
  end
  for _, name in ipairs(protocol.arguments or {}) do
    check[name] = tonumber(ARGV[next_arg])
    next_arg = next_arg + 1
  end
  checks[#checks + 1] = check
end

-- Reading and stepping write nothing. A value that no limit wrote is removed, so the limit recovers and
-- the error is reported once; a read-only operation leaves it.
local known, new_reservations = not settling, {}
-- Another caller may have the place of a lease that has ended, so no other check makes its renewal known.
local lease_has_ended = false
local function read_and_step(check)
  reading = check.reservation_place
  local status, reservation = look_up(check)
  known = known or status ~= 'unknown'
  if status == 'unknown' and operation == 'renew' and check.algorithm.renew then lease_has_ended = true end
  reading = check.place
  check.state = read(check)
  local charged_at = check.algorithm.charged_at
  local at = charged_at and charged_at(check.limit, check.state, now) or now
  check.at = at
  if status == 'done' or status == 'unknown' then
    check.decision = untouched(check, check.state)
    if reservation and reservation.reserved then
      -- From now on a caller relies on it.
      reservation.reserved, check.reservation = false, reservation
    end
  elseif status == 'live' then
    check.decision, check.write, check.put, check.expires = settle(check, reservation)
    if operation == 'settle' then
      if once then
        -- 2^52 - 1 is the last time.
        local forgotten = math.min(now + REPEAT_US, ends(reservation, check.life_us), 4503599627370495)
        reservation.timestamp, reservation.since = forgotten, now
      end
      reservation.settled_text = check.cost_text
    else
      -- A charge that did not move only lives longer.
      if check.write == 'put' then reservation.timestamp = at end
      reservation.since, reservation.reserved = math.max(at, reservation.since), false
    end
    check.reservation = reservation
  else
    check.decision, check.write, check.put, check.expires = apply(check)
    -- An acquired charge awaits its settlement; every other operation settles at once.
    local settled_text = operation ~= 'acquire' and check.cost_text or nil
    check.reservation = {
      timestamp = at,
      since = at,
      cost_text = check.cost_text,
      settled_text = settled_text,
      reserved = protocol.reserves,
      group = group,
    }
    -- The limits of a stack share a reservation, which counts as made at the latest of their times.
    local latest = new_reservations[check.reservation_key]
    if check.reservation_key and latest then
      latest.timestamp, latest.since = math.max(latest.timestamp, at), math.max(latest.since, at)
      check.reservation = latest
    elseif check.reservation_key then
      new_reservations[check.reservation_key] = check.reservation
    end
  end
end

-- The server's own error, such as WRONGTYPE: with its code in front, as outside of a pcall.
local function server_error(problem)
  local message = type(problem) == 'table' and problem.err or tostring(problem)
  return string.match(message, '%u%u+ .*') or 'ERR ' .. message
end

for position, check in ipairs(checks) do
  local done, problem = pcall(protocol.read_and_step or read_and_step, check)
  if problem == CORRUPT then
    if not only_looks then
      if reading == check.place then
        check.algorithm.remove(check.key, check.field)
      else
        redis.call('DEL', check.reservation_key)
      end
    end
    return redis.error_reply('RLCORRUPT ' .. position .. ' ' .. reading)
  end
  if not done and type(problem) == 'table' and problem.code then
    return redis.error_reply(problem.code .. ' ' .. position .. ' ' .. (problem.more or ''))
  end
  if not done then
    local message = server_error(problem)
    if string.match(message, '^WRONGTYPE') then
      message = 'RLWRONGTYPE ' .. position .. ' ' .. reading
    end
    return redis.error_reply(message)
  end
  all_allowed = all_allowed and check.decision.allowed
end
if not known or lease_has_ended then return redis.error_reply('RLUNKNOWN no reservation has this id') end

local function ttl_ms(expires)
  return math.max(ceil_div(math.max(expires - now, 0), 1000), 1) + padding_ms
end

local function put_reservation(check, reservation)
  local stored = text(reservation.timestamp) .. ' ' .. text(reservation.since) .. ' ' .. reservation.cost_text
  if reservation.settled_text then stored = stored .. ' ' .. reservation.settled_text end
  stored = stored .. reservation.group
  if reservation.reserved and not reservation.settled_text then stored = stored .. RESERVED end
  local life_ms = ttl_ms(ends(reservation, check.life_us))
  redis.call('SET', check.reservation_key, stored, 'PX', text(life_ms))
end

if tried then return {} end

-- Write, or else let the checks that would have admitted show their state without the charge.
local answer, writing, wrote = {}, nil, false
local function write_and_reply(check)
  local decision, counts = check.decision, check.attempt > 0
  local charged = all_allowed or counts
  if not (all_allowed or protocol.asks) then
    if counts then
      decision.retry_after_us = wait_us(check)
    elseif decision.allowed then
      decision = untouched(check, check.state)
    end
  end
  check.shown = decision
  local denied_wait_us = (protocol.asks or protocol.reserves) and counts and wait_us(check)
  if charged and operation ~= 'peek' then
    if check.write == 'put' then
      -- A log is otherwise changed by what was added to it.
      if healing then check.algorithm.remove(check.key, check.field) end
      check.algorithm.put(check.key, check.field, check.put, ttl_ms(check.expires), metadata)
    elseif check.write == 'remove' then
      check.algorithm.remove(check.key, check.field)
    end
    if check.reservation_key and check.reservation then put_reservation(check, check.reservation) end
    if protocol.write then protocol.write(check) end
    wrote = wrote or check.write ~= nil
  end
  reply(answer, decision)
  if protocol.reply then protocol.reply(answer, check, charged and check.write, denied_wait_us) end
end

local done, problem = pcall(function()
  for _, check in ipairs(checks) do
    writing = check
    write_and_reply(check)
  end
end)
if not done then
  -- If the server refuses a command after others, for example one that the user may not call, the
  -- earlier writes remain.
  local message = server_error(problem)
  local seen, shown = pcall(function() return untouched(writing, read(writing)) end)
  local before = untouched(writing, writing.state)
  local changed = not seen or writing.algorithm.own_key or shown.remaining ~= before.remaining
  if wrote or (changed and not string.match(message, '^OOM')) then message = 'RLPART ' .. message end
  return redis.error_reply(message)
end

return answer
