-- Runs an operation on a batch, all or nothing. It reads and steps everything first and writes
-- last, so a script that fails has written nothing. What the decision means, `decide` in
-- ratelimit-core derives from what the script read.
--
--     KEYS: the keys of the batch, each once.
--     ARGV: the time (begin.lua); the operation ('settle-once' for an id that was drawn for one
--           charge); the caller's metadata; the text that ends a reservation (its group; empty for
--           one check). Then per check: the algorithm; the index of its key; the field; the cost;
--           the most that a denied attempt is charged (0 if only admitted requests are charged);
--           the index in KEYS of the reservation under the batch's id (0 without an id); its life
--           in µs; what the operation needs besides ('adopt': the limit's number); and the
--           algorithm's parameters. A stack of limits is one check per limit.
--
-- A batch whose keys lie in several slots runs one script per slot. cross_slot/lua.rs says when
-- each of these is called:
--
--     ask      A peek that removes what no limit wrote, as an acquire does.
--     reserve  An acquire that may be taken back. Answers where each charge went, or '-'.
--     grow     An extension that may be taken back. Answers as 'reserve', with a colon and what the
--              reservation was before.
--     undo     Takes back what 'reserve' or 'grow' charged, given as they answered it. Answers 1 or
--              0 for each check.
--     attempt  An acquire of a batch that another slot has denied.
--
-- 'heal' sets each state to a full limit as of now if it still is as given. Answers 1 or 0 for each
-- check.
--
-- The reply is as that of decide.lua: the time; a line; and the states that the script read, then
-- the reservations under the id, each as its length, a colon and its bytes. The line begins with 1
-- if all checks admit, 0 if not, and = if the script only looked, or refused for what it read.
--
-- Or an error: RLCORRUPT or RLWRONGTYPE with the indices of check and key; RLPART and the server's
-- error, if something was written before it; or RLTIME with a time of the server at which nothing
-- is decided.

-- The twins of the request, by name.
local algorithms = {}
local operation, metadata, group = ARGV[first0], ARGV[first0 + 1], ARGV[first0 + 2]
-- Whether the settled reservation is forgotten early: its id was drawn for one charge.
local once = operation == 'settle-once'
-- How long it is remembered, in case that the settlement is sent again; `Reservation::REPEAT_US` in
-- ratelimit-core.
local REPEAT_US = 10000000
local grows, denied = operation == 'grow', operation == 'attempt'
local reserves = grows or operation == 'reserve'
-- Whether a value that no limit wrote is removed, so the limit recovers and the error is reported
-- once.
local removes = operation ~= 'peek'
if operation == 'ask' then operation = 'peek' end
if once then operation = 'settle' end
if reserves or denied then operation = grows and 'extend' or 'acquire' end
local looks, extends = operation == 'peek', operation == 'extend'
local settling = extends or operation == 'settle' or operation == 'renew'
-- The index of the key that is being read.
local reading

-- Raised when an earlier request under the id refuses this one.
local REFUSED = {}
-- Marks a reservation of one slot of several: the request that made it may take it back until
-- another caller learns that the id has it.
local RESERVED = ' ?'

local checks, next_arg = {}, first0 + 3
while ARGV[next_arg] do
  local name, place, field, cost, attempt, reservation_place, life_us, given = unpack(ARGV, next_arg, next_arg + 7)
  algorithms[name] = algorithms[name] or twin_of(name)
  local algorithm, limit = algorithms[name], {}
  next_arg = next_arg + 8
  for _, parameter in ipairs(algorithm.parameters) do
    limit[parameter] = tonumber(ARGV[next_arg])
    next_arg = next_arg + 1
  end
  checks[#checks + 1] = {
    operation = operation,
    algorithm = algorithm,
    limit = limit,
    place = place,
    key = KEYS[place + 0],
    field = field,
    -- Costs are compared as text, because the largest have no exact number. Calculations use a
    -- number.
    cost_text = cost,
    cost = math.min(cost + 0, 2 ^ 53 - 1),
    attempt = attempt + 0,
    reservation_place = reservation_place,
    reservation_key = KEYS[reservation_place + 0],
    life_us = life_us + 0,
    given = given,
    note = '-',
    kept = '',
    seen = '',
    fits = true,
  }
end

-- When a reservation ends. A settled one that is forgotten early says so by a timestamp later than
-- `since`.
local function ends(reservation, life_us)
  if reservation.settled_text and reservation.timestamp > reservation.since then return reservation.timestamp end
  return reservation.since + life_us
end

-- Whether digits are a number of more than 64 bits. A cost may have as many: Rust reads it.
local function is_too_long(digits)
  return #digits > 20 or #digits == 20 and digits > '18446744073709551615'
end

-- A reservation from its numbers.
local function parsed(numbers)
  local timestamp, since, cost, rest = match(numbers, '^(%d+) (%d+) (%d+) ([ %d]+)$')
  local settled = match(rest or '', '^%d+$')
  local counts, first, second, third = match(rest or '', '^(%d+) (%d+) (%d+) (%d+)$')
  local reservation = {
    numbers = numbers,
    timestamp = integer(timestamp),
    since = integer(since),
    cost_text = cost,
    -- A settled cost may be any.
    cost = settled and tonumber(cost) or integer(cost),
    settled_text = settled,
    counts = settled and 0 or integer(counts),
    terms = settled and { 0, 0, 0 } or { integer(first), integer(second), integer(third) },
  }
  local latest = math.max(reservation.timestamp, reservation.since)
  if latest > MOST or is_too_long(cost) or settled and is_too_long(settled) then error(CORRUPT) end
  return reservation
end

-- The reservation under the batch's id; nil if there is none or it has ended.
local function live_reservation(check)
  local stored = call('GET', check.reservation_key)
  if not stored then return nil end
  check.kept = stored
  local reserved = string.sub(stored, -#RESERVED) == RESERVED
  if reserved then stored = string.sub(stored, 1, -#RESERVED - 1) end
  local alone, its_group = match(stored, '^([ %d]-)( @' .. string.rep('%x', 16) .. ' [%w%-_.,]+)$')
  local reservation = parsed(alone or stored)
  reservation.reserved, reservation.group = reserved, its_group or ''
  if now < ends(reservation, check.life_us) then return reservation end
end

local function seen(check, state)
  return check.algorithm.seen(check.limit, state, check)
end

local function read(check)
  if check.reservation_key then
    reading = check.reservation_place
    check.known = live_reservation(check)
  end
  reading = check.place
  local found
  if operation == 'reset' then
    -- It does not have to understand the state.
    local done, problem = pcall(check.algorithm.read, check.key, check.field)
    if not done and problem ~= CORRUPT then error(problem, 0) end
    found = done and problem
  else
    found = check.algorithm.read(check.key, check.field)
  end
  if found then check.state, check.seen = found, seen(check, found) end
end

-- What the batch's id means for a check: nil if it is new, 'done', 'unknown', or 'live' for a
-- reservation.
local function status(check)
  local reservation = check.known
  if not reservation then return settling and 'unknown' or nil end
  if reservation.group ~= group then error(REFUSED) end
  if reservation.settled_text then
    -- The same request again is how a client asks for a lost reply.
    local same = reservation.settled_text == check.cost_text
    if same and operation ~= 'acquire' and operation ~= 'renew' and not extends then return 'done' end
    error(REFUSED)
  end
  if settling then return 'live' end
  if operation ~= 'acquire' and not looks or reservation.cost_text ~= check.cost_text then error(REFUSED) end
  return 'done'
end

-- Notes what a step finds and changes, and what a charge is in the terms of the state. Returns the
-- time at which a charge counts as made.
local function change(check, name, cost, made, reservation)
  local at
  check.fits, check.write, check.put, check.expires, at, check.terms =
    check.algorithm.change(check.limit, check.state, name, cost, made, reservation)
  return at or now
end

-- Charges `more` to a reservation, if that fits.
local function extend(check, reservation, more)
  local algorithm, left = check.algorithm, nil
  if algorithm.keeps_terms then
    left = algorithm.change(check.limit, check.state, 'left', reservation.counts, reservation.timestamp, reservation)
  end
  local at = change(check, 'acquire', more)
  check.made, check.before = at, string.gsub(reservation.numbers, ' ', ',')
  reservation.cost_text, reservation.counts = check.cost_text, (left or reservation.counts) + more
  if left then reservation.timestamp, reservation.terms = at, check.terms end
  return at
end

-- The largest cost that fits a limit, by bisection: a twin says only whether a cost does. The twins
-- of a stack were given the same number, and are asked once, before the first of them is changed.
local known = {}
local function remaining(number)
  if known[number] then return known[number] end
  local function fits(cost)
    for _, check in ipairs(checks) do
      if check.given == number then
        change(check, 'acquire', cost)
        if not check.fits then return false end
      end
    end
    return true
  end
  local above = 1
  while fits(above) do above = above * 2 end
  known[number] = first_for(floor(above / 2) + 1, above, function(cost) return not fits(cost) end) - 1
  return known[number]
end

-- Applies the operation to a check whose id is new.
local function apply(check)
  local cost = check.cost
  if operation == 'reset' then
    local at = change(check, 'acquire', 0)
    check.fits, check.write = true, 'remove'
    return at
  elseif operation == 'force' then
    return change(check, 'force', cost)
  elseif operation == 'adopt' then
    return change(check, 'force', math.max(0, remaining(check.given) - cost))
  elseif operation == 'refund' then
    return change(check, 'give', cost)
  end
  local at = change(check, 'acquire', cost)
  if not check.fits and check.attempt > 0 then
    change(check, 'fill', math.min(cost, check.attempt))
    check.fits = false
  end
  return at
end

-- Settles, renews or extends a reservation.
local function settle(check, reservation)
  local algorithm, cost = check.algorithm, check.cost
  if extends then
    local more = cost > reservation.cost
    if more and algorithm.settles == 'all' then error(REFUSED) end
    local at
    if more then
      at = extend(check, reservation, cost - reservation.cost)
    else
      at = change(check, 'acquire', 0)
    end
    reservation.reserved = grows and more
    -- A lease is moved to live longer.
    if algorithm.settles ~= 'all' then reservation.since = math.max(at, reservation.since) end
    return at
  elseif algorithm.settles == 'all' then
    return change(check, operation, reservation.cost, reservation.timestamp)
  elseif operation == 'renew' then
    return change(check, 'acquire', 0)
  elseif not algorithm.settles then
    error(REFUSED)
  elseif cost >= reservation.cost then
    return change(check, 'force', cost - reservation.cost)
  end
  return change(check, 'give', math.min(reservation.cost - cost, reservation.counts), reservation.timestamp, reservation)
end

local known, lease_has_ended, new_reservations = not settling, false, {}
local function step(check)
  reading = check.place
  if operation == 'heal' then
    check.heals = check.seen == check.given
    if check.heals then
      check.state = nil
      change(check, 'full', check.cost)
    end
    return
  elseif operation == 'undo' then
    local reservation = check.known
    local own = not check.reservation_key
      or reservation and reservation.reserved and reservation.cost_text == check.cost_text and reservation.group == group
    if not own then return end
    local made, numbers = match(check.given, '^(%d+):?([%d,]*)$')
    local before = numbers ~= '' and parsed((string.gsub(numbers, ',', ' '))) or nil
    change(check, 'undo', check.cost - (before and before.cost or 0), tonumber(made))
    if check.write and before then
      before.group, check.reservation = reservation.group, before
    end
    return
  end
  local is, reservation = status(check), check.known
  known = known or is ~= 'unknown'
  -- If one lease of the batch has ended, another caller may have its place: the renewal is
  -- refused even if the other checks still hold theirs.
  lease_has_ended = lease_has_ended or is == 'unknown' and operation == 'renew' and check.algorithm.settles == 'all'
  if is == 'done' then
    if reservation.reserved then
      -- From now on a caller relies on it.
      reservation.reserved, check.reservation = false, reservation
    end
  elseif is == 'live' then
    local at = settle(check, reservation)
    if operation == 'settle' then
      if once then
        local forgotten = math.min(now + REPEAT_US, ends(reservation, check.life_us), MOST)
        reservation.timestamp, reservation.since = forgotten, now
      end
      reservation.settled_text = check.cost_text
    elseif not extends then
      -- A charge that did not move only lives longer.
      if check.write == 'put' then reservation.timestamp = at end
      reservation.since, reservation.reserved = math.max(at, reservation.since), false
    end
    check.reservation = reservation
  elseif not is then
    local at = apply(check)
    check.made = at
    if not check.reservation_key then return end
    -- An acquired charge awaits its settlement; every other operation settles at once.
    local settled_text = operation ~= 'acquire' and check.cost_text or nil
    check.reservation = {
      timestamp = at,
      since = at,
      cost_text = check.cost_text,
      counts = check.cost,
      terms = check.terms or { 0, 0, 0 },
      settled_text = settled_text,
      reserved = reserves,
      group = group,
    }
    -- The limits of a stack share a reservation, which counts as made at the latest of their times.
    local latest = new_reservations[check.reservation_key]
    if latest then
      latest.timestamp, latest.since = math.max(latest.timestamp, at), math.max(latest.since, at)
      check.reservation = latest
    else
      new_reservations[check.reservation_key] = check.reservation
    end
  end
end

-- The server's own error, such as WRONGTYPE: with its code in front, as outside of a pcall.
local function server_error(problem)
  local message = type(problem) == 'table' and problem.err or tostring(problem)
  return match(message, '%u%u+ .*') or 'ERR ' .. message
end

local line = looks and '=' or denied and '0' or '1'
local function answer()
  local words = { time0, line }
  if reserves or operation == 'undo' or operation == 'heal' then
    for _, check in ipairs(checks) do words[#words + 1] = ' ' .. check.note end
  end
  words[#words + 1] = '\n'
  for _, check in ipairs(checks) do words[#words + 1] = #check.seen .. ':' .. check.seen end
  for _, check in ipairs(checks) do
    if check.reservation_key then words[#words + 1] = #check.kept .. ':' .. check.kept end
  end
  return table.concat(words)
end

-- Reads every check, and then steps every check.
for _, work in ipairs { read, step } do
  for position, check in ipairs(checks) do
    local done, problem = pcall(work, check)
    if problem == CORRUPT then
      if removes and reading == check.place then
        check.algorithm.remove(check.key, check.field)
      elseif removes then
        call('DEL', check.reservation_key)
      end
      return redis.error_reply('RLCORRUPT ' .. position .. ' ' .. reading)
    elseif problem == REFUSED then
      line = '='
      return answer()
    elseif not done then
      local message = server_error(problem)
      if match(message, '^WRONGTYPE') then message = 'RLWRONGTYPE ' .. position .. ' ' .. reading end
      return redis.error_reply(message)
    end
    if work == step and not check.fits and not looks then line = '0' end
  end
end
if not known or lease_has_ended then line = '=' end
if line == '=' then return answer() end

local function put_reservation(check, reservation)
  local stored = format('%d %d %s ', reservation.timestamp, reservation.since, reservation.cost_text)
  if reservation.settled_text then
    stored = stored .. reservation.settled_text
  else
    stored = stored .. format('%d %d %d %d', reservation.counts, unpack(reservation.terms))
  end
  stored = stored .. reservation.group
  if reservation.reserved and not reservation.settled_text then stored = stored .. RESERVED end
  local life_ms = ttl_ms(ends(reservation, check.life_us))
  call('SET', check.reservation_key, stored, 'PX', format('%d', life_ms))
end

local function writes(check)
  return line == '1' or check.attempt > 0
end

-- Asks how long a key lives, and whether the user may extend that, before anything is written: a
-- key never lives for ever.
local function keep(check)
  if not writes(check) or check.write ~= 'put' then return end
  check.life = call('PTTL', check.key)
  -- Redis 7.0 reads the time anew for each PTTL: by the write, a life that just sufficed may be too
  -- short.
  if check.life < state_ttl_ms(check.expires) + 100 and may0 and not may0('PEXPIRE', check.key, '1') then
    -- The server says why.
    call('PEXPIRE', check.key, '1')
  end
end

local wrote = false
local function write(check)
  local algorithm = check.algorithm
  if writes(check) then
    -- A log is otherwise changed by what was added to it.
    if check.heals then algorithm.remove(check.key, check.field) end
    if check.write == 'put' then
      local ttl = state_ttl_ms(check.expires)
      algorithm.put(check.key, check.field, check.put, ttl, metadata)
      if not padding_ms then sweep(check.key, 1, check.life, ttl) end
    elseif check.write == 'remove' then
      algorithm.remove(check.key, check.field)
    end
    if check.reservation_key and check.reservation then
      put_reservation(check, check.reservation)
    elseif check.reservation_key and operation == 'undo' and check.write then
      call('DEL', check.reservation_key)
    end
    wrote = wrote or check.write
    if reserves and check.write and check.made then
      local mark = algorithm.mark and algorithm.mark(algorithm.read(check.key, check.field))
      check.note = format('%d', mark or check.made) .. (check.before and ':' .. check.before or '')
    elseif operation == 'undo' or operation == 'heal' then
      check.note = check.write and 1 or 0
    end
  end
end

for _, work in ipairs { keep, write } do
  for _, check in ipairs(checks) do
    local done, problem = pcall(work, check)
    if not done then
      -- If the server refuses a command after others, for example one that the user may not call,
      -- the earlier writes remain.
      local message = server_error(problem)
      local again, found = pcall(check.algorithm.read, check.key, check.field)
      local changed = not again or (found and seen(check, found) or '') ~= check.seen
      if wrote or (changed and not match(message, '^OOM')) then message = 'RLPART ' .. message end
      return redis.error_reply(message)
    end
  end
end

return answer()
