-- The start of every script that contains the driver: exact integers, and states that are a few numbers.
--
-- Lua 5.1 only has doubles. Every number here is an integer below 2^53, which a double represents
-- exactly. The remainder of two such numbers is exact too, and so are the divisions below.

local ceil, floor = math.ceil, math.floor
-- The time of the request, which checks.lua reads.
local now

local function floor_div(a, b)
  return (a - math.fmod(a, b)) / b
end

local function ceil_div(a, b)
  local rest = math.fmod(a, b)
  if rest == 0 then return a / b end
  return (a - rest) / b + 1
end

-- An integer as text. `tostring` and `..` would round it to 14 digits.
local function text(number)
  return string.format('%.0f', number)
end

-- An integer below 2^53 from its digits, or nil.
local function integer(digits)
  local number = tonumber(digits)
  if #digits <= 16 and number < 9007199254740992 then return number end
end

-- floor(a * b / c) and the remainder, exactly; a or b is at most c. A product too large for a double is
-- avoided: b is multiplied in bit by bit, from the highest.
local function multiplied_divided(a, b, c)
  if a > c then a, b = b, a end
  if a * b < 9007199254740992 then
    local rest = math.fmod(a * b, c)
    return (a * b - rest) / c, rest
  end
  local quotient, rest = 0, 0
  local function carry()
    if rest >= c then
      rest, quotient = rest - c, quotient + 1
    end
  end
  for bit = 51, 0, -1 do
    quotient, rest = 2 * quotient, 2 * rest
    carry()
    if b >= 2 ^ bit then
      b, rest = b - 2 ^ bit, rest + a
      carry()
    end
  end
  return quotient, rest
end

-- The largest count: 2^52 - 1.
local MOST = 4503599627370495

-- A sum or difference of two totals, wrapped around at 2^52. No intermediate value exceeds 2^53.
local function around(total)
  if total < 0 then return total + MOST + 1 end
  return math.fmod(total, MOST + 1)
end

-- Raised when the key contains a value that no limit wrote.
local CORRUPT = {}

-- Extends the key's life to at least `ttl_ms`. Another limit of the same key may need more.
local function expire(key, ttl_ms)
  if redis.call('PTTL', key) < ttl_ms then
    redis.call('PEXPIRE', key, text(ttl_ms))
  end
end

-- What an algorithm stored in a field of the identifier's hash behind its name and a space; nil if there is nothing.
local function read_field(key, field, algorithm)
  local stored = redis.call('HGET', key, field)
  if not stored then return nil end
  local writer, rest = string.match(stored, '^([%w_-]+) (.*)$')
  if not writer then error(CORRUPT) end
  if writer == algorithm then return rest, stored end
  -- The limit had another algorithm before, whose state means nothing to this one.
  if not string.match(rest, '^[ %d]+$') and math.fmod(#rest, 7) ~= 0 then error(CORRUPT) end
end

-- The `retry_after_us` of a cost that never fits.
local NEVER = -1

-- Builds the table of a twin in sections. Its state is so many numbers, packed in a field of the identifier's hash by
-- this format: the name, the numbers, and until when the key is kept. `run` contains the sections. It takes an operation
-- and the units to charge, to return, or to leave room for. It returns the used cost before and after, the time at which
-- the charge counts as made, and, if these differ, the new state and when it stops to matter.
local function of_numbers(name, count, format, parameters, run, refunds, mark)
  local twin = { parameters = { 'capacity', 'cost_unit' } }
  for _, parameter in ipairs(parameters) do twin.parameters[#twin.parameters + 1] = parameter end

  function twin.read(key, field)
    local packed, stored = read_field(key, field, name)
    if not packed then return nil end
    if #packed ~= 7 * (count + 1) then error(CORRUPT) end
    local state = { select(2, struct.unpack(format, stored)) }
    for i = 1, count do
      if state[i] >= 9007199254740992 then error(CORRUPT) end
    end
    state = { unpack(state, 1, count) }
    if not run(nil, state, 0, 'valid') then error(CORRUPT) end
    return state
  end

  function twin.put(key, field, state, ttl_ms)
    -- Until when the key is kept, on the server's clock; 0 if that is not known.
    local kept_ms = ARGV[2] == '' and floor_div(now, 1000) + ttl_ms - 10 or 0
    state[count + 1] = math.max(kept_ms, 0)
    redis.call('HSET', key, field, struct.pack(format, name .. ' ', unpack(state, 1, count + 1)))
    expire(key, ttl_ms)
  end

  function twin.remove(key, field)
    redis.call('HDEL', key, field)
  end

  local function decision(limit, state, now, retry_us)
    local used = run(limit, state, now, 'acquire', 0)
    local reset_us = used > 0 and run(limit, state, now, 'wait', 0) or now
    local remaining = floor_div(math.max(limit.capacity - used, 0), limit.cost_unit)
    local room = limit.capacity - (remaining + 1) * limit.cost_unit
    local grown_us = room >= 0 and run(limit, state, now, 'wait', room) or now
    return {
      allowed = retry_us == 0,
      remaining = remaining,
      retry_after_us = retry_us,
      replenish_after_us = math.max(grown_us - now, 0),
      reset_after_us = math.max(reset_us - now, 0),
    }
  end

  local function moved(limit, state, now, operation, charge, made)
    local used, after, _, put, expires = run(limit, state, now, operation, charge, made)
    if after == used then return decision(limit, state, now, 0) end
    if not put then return decision(limit, nil, now, 0), 'remove' end
    return decision(limit, put, now, 0), 'put', put, expires
  end

  function twin.step(limit, state, now, cost)
    local charge = cost * limit.cost_unit
    if charge > limit.capacity then return decision(limit, state, now, NEVER) end
    local _, after = run(limit, state, now, 'acquire', charge)
    if cost > 0 and after > limit.capacity then
      local fits_us = run(limit, state, now, 'wait', limit.capacity - charge)
      return decision(limit, state, now, fits_us - now)
    end
    return moved(limit, state, now, 'acquire', charge)
  end

  function twin.force(limit, state, now, cost)
    return moved(limit, state, now, 'force', cost * limit.cost_unit)
  end

  -- Charges a request that does not fit, up to the capacity.
  function twin.fill(limit, state, now, charge)
    return select(2, moved(limit, state, now, 'fill', charge * limit.cost_unit))
  end

  function twin.charged_at(limit, state, now)
    return (select(3, run(limit, state, now, 'acquire', 0)))
  end

  if refunds then
    function twin.refund(limit, state, now, cost)
      return moved(limit, state, now, 'give', cost * limit.cost_unit)
    end
    if mark then
      -- Takes back a charge that was made where the mark says.
      function twin.undo(limit, state, now, made, cost)
        return moved(limit, state, now, 'give', cost * limit.cost_unit, made)
      end
      function twin.mark(state)
        return run(nil, state, 0, 'mark')
      end
    else
      -- Charges the difference, or returns the excess that still counts.
      function twin.settle(limit, state, now, reservation, cost)
        if cost >= reservation.cost then return twin.force(limit, state, now, cost - reservation.cost) end
        return moved(limit, state, now, 'give', (reservation.cost - cost) * limit.cost_unit, reservation.timestamp)
      end
    end
  end
  return twin
end

-- Storage for a state of many pairs of numbers: as alternating text in a field of the identifier's hash.
-- `first` and `second` name the two numbers of a pair.
local function number_pairs(algorithm, first, second)
  local storage = {}

  function storage.read(key, field)
    local stored = read_field(key, field, algorithm)
    if not stored then return nil end
    local all, length = {}, 0
    stored = ' ' .. stored
    for pair_text, a, b in string.gmatch(stored, '( (%d+) (%d+))') do
      local begun, number = integer(a) or error(CORRUPT), integer(b) or error(CORRUPT)
      all[#all + 1] = { [first] = begun, [second] = number, text = pair_text }
      length = length + #pair_text
    end
    if length ~= #stored or length == 0 then error(CORRUPT) end
    return all
  end

  -- An unchanged pair is written as it was read; a changed one is a new table.
  function storage.put(key, field, all, ttl_ms)
    local words = { algorithm }
    for i, pair in ipairs(all) do
      words[i + 1] = pair.text or ' ' .. text(pair[first]) .. ' ' .. text(pair[second])
    end
    redis.call('HSET', key, field, table.concat(words))
    expire(key, ttl_ms)
  end

  function storage.remove(key, field)
    redis.call('HDEL', key, field)
  end

  return storage
end

-- The algorithms of this script, by name.
local algorithms = {}
