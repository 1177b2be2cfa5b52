-- What every script begins with: exact integers, and states that are a few numbers.
--
-- Lua 5.1 has doubles only. Every number here is an integer below 2^53, which a double holds
-- exactly; the remainder of two such is exact as well, and so are the divisions below.

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

-- The units that a bucket is given back when what is held is settled at `cost`, which is less: all of
-- them if the key was charged last when this was; otherwise those that cannot have flowed back since,
-- whatever else was charged.
local function units_given_back(limit, hold, cost, now, state)
  local too_much = math.min(hold.cost - cost, limit.burst) * limit.token_units
  if state and state.tick == hold.tick then return too_much end
  local ago_us = math.max(now - hold.tick, 0)
  local full_ticks = ceil_div(limit.burst * limit.token_units, limit.tick_units)
  if ago_us >= full_ticks * limit.tick_us then return 0 end
  return math.max(too_much - ceil_div(ago_us, limit.tick_us) * limit.tick_units, 0)
end

-- The largest that a count becomes: 2^52 - 1.
local MOST = 4503599627370495

-- A sum or a difference of two totals that are counted round and round below 2^52. Nothing is above
-- 2^53 on the way.
local function around(total)
  if total < 0 then return total + MOST + 1 end
  return math.fmod(total, MOST + 1)
end

-- Raised when the key holds what no limit of ours wrote.
local CORRUPT = {}

-- Lets a key live for at least `ttl_ms`. Another limit of the same key may need it longer.
local function expire(key, ttl_ms)
  if redis.call('PTTL', key) < ttl_ms then
    redis.call('PEXPIRE', key, text(ttl_ms))
  end
end

-- The numbers, as text, that an algorithm left in a field of the identifier's hash; nil if it left
-- none.
local function read_text(key, field, algorithm)
  local stored = redis.call('HGET', key, field)
  if not stored then return nil end
  local writer, digits = string.match(stored, '^([%l-]+)([ %d]+)$')
  if not writer then error(CORRUPT) end
  -- The limit was of another algorithm before: its state says nothing to this one.
  if writer ~= algorithm then return nil end
  return digits
end

-- How a state of a few numbers is kept: as text in a field of the identifier's hash, such as
-- "gcra 1795218392123456 0 1795218391123456". `names` are those of the numbers, in their order.
local function numbers(algorithm, names)
  local pattern = '^' .. string.rep(' (%d+)', #names) .. '$'
  local storage = {}

  function storage.read(key, field)
    local stored = read_text(key, field, algorithm)
    if not stored then return nil end
    local digits = { string.match(stored, pattern) }
    local state = {}
    for i, name in ipairs(names) do
      state[name] = digits[i] and integer(digits[i]) or error(CORRUPT)
    end
    return state
  end

  function storage.put(key, field, state, ttl_ms)
    local stored = algorithm
    for _, name in ipairs(names) do stored = stored .. ' ' .. text(state[name]) end
    redis.call('HSET', key, field, stored)
    expire(key, ttl_ms)
  end

  function storage.remove(key, field)
    redis.call('HDEL', key, field)
  end

  return storage
end

-- How a state of many pairs of numbers is kept: as text in a field of the identifier's hash, all of
-- them in turn. `first` and `second` are what the two of a pair are called.
local function number_pairs(algorithm, first, second)
  local storage = {}

  function storage.read(key, field)
    local stored = read_text(key, field, algorithm)
    if not stored then return nil end
    local all, length = {}, 0
    for pair_text, a, b in string.gmatch(stored, '( (%d+) (%d+))') do
      local begun, number = integer(a) or error(CORRUPT), integer(b) or error(CORRUPT)
      all[#all + 1] = { [first] = begun, [second] = number, text = pair_text }
      length = length + #pair_text
    end
    if length ~= #stored or length == 0 then error(CORRUPT) end
    return all
  end

  -- A pair that is as it was read is written as it was: a changed one is a new table.
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

-- The algorithms of this script, by their names.
local algorithms = {}

-- A `retry_after_us` of a cost that never fits.
local NEVER = -1
