-- The start of the driver: what the twins in it use. Lua 5.1 only has doubles. Every number here is
-- an integer below 2^53, which a double represents exactly.

-- The largest count and the last time.
local MOST = 2 ^ 52 - 1

-- Raised when a key contains a value that no limit wrote.
local CORRUPT = {}

-- An integer below 2^53 from its digits.
local function integer(digits)
  local number = digits and #digits <= 16 and tonumber(digits)
  if not number or number >= 2 ^ 53 then error(CORRUPT) end
  return number
end

-- A sum or difference of two totals, wrapped around at 2^52. No intermediate value exceeds 2^53.
local function around(total)
  return total % (MOST + 1)
end

-- Binary search: the first number from `low` on for which `holds`, which once true stays true;
-- `high` if there is none.
local function first_for(low, high, holds)
  while low < high do
    local middle = floor((low + high) / 2)
    if holds(middle) then high = middle else low = middle + 1 end
  end
  return low
end

-- How long a key has to live whose state matters until `expires`. It lives longer at a given time,
-- by the padding.
local function ttl_ms(expires)
  return math.max(ceil((expires - now) / 1000), 1) + (padding_ms or 0)
end

-- The same for the key of a state. It lives 20 ms longer, so that a state has ended by the time
-- until which its key is kept.
local function state_ttl_ms(expires)
  return ttl_ms(expires + 20000)
end

-- Until when a key with so long to live is kept, by the server's clock; 0 if a given time says
-- nothing about that.
local function kept_ms(ttl)
  if padding_ms then return 0 end
  return math.max(floor(now / 1000) + ttl - 10, 0)
end

-- Extends the key's life to at least `ttl`. Another limit of the same key may need more.
local function expire(key, ttl)
  if call('PTTL', key) < ttl then call('PEXPIRE', key, format('%d', ttl)) end
end

-- Writes a field of the identifier's hash.
local function put_field(key, field, stored, ttl)
  call('HSET', key, field, stored)
  expire(key, ttl)
end

-- What an algorithm stored in a field of the identifier's hash: its name, a space and the rest,
-- without until when the key is kept; nil if there is nothing.
local function read_field(key, field, algorithm)
  local stored = call('HGET', key, field)
  if not stored then return nil end
  if match(stored, '^([%w_-]+) ') ~= algorithm then error(CORRUPT) end
  return string.sub(stored, 1, -8)
end

-- Adds to a twin how its state is stored in a field of the identifier's hash. A state is that text,
-- or a table with it.
local function in_field(twin)
  function twin.seen(_, state)
    return type(state) == 'table' and state.stored or state or ''
  end

  function twin.put(key, field, stored, ttl)
    put_field(key, field, stored .. pack0('<I7', kept_ms(ttl)), ttl)
  end

  function twin.remove(key, field)
    call('HDEL', key, field)
  end

  return twin
end

-- The table of a twin in sections. `look` raises CORRUPT unless a text is a state, and returns its
-- mark. `run` contains the sections; it gets units instead of a cost.
local function of_numbers(parameters, look, run, settles, keeps_terms)
  local twin = in_field { parameters = parameters, mark = look, settles = settles, keeps_terms = keeps_terms }

  function twin.read(key, field)
    local stored = call('HGET', key, field) or nil
    if stored then look(stored) end
    return stored
  end

  -- The text says until when the key is kept.
  twin.put = put_field

  function twin.change(limit, stored, operation, cost, made, reservation)
    if operation == 'full' then return run(limit, nil, 'force', limit.most or limit.capacity) end
    return run(limit, stored, operation, cost * limit.cost_unit, made, reservation)
  end

  return twin
end

-- Removes the fields of a key that have ended.
local function sweep(key, fields, life_ms, ttl_ms)
  --[[sweep]]
end

-- The twin of this name. It is made for a request that has it.
local function twin_of(name)
  --[[each]]
  --[[if]] name == '--[[name]]' then
    --[[twin]]
  --[[end]]
  end
end
