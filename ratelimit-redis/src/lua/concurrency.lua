-- The concurrency limit: at most so many leases at the same time, each for a limited time.
--
-- The state is the leases, oldest first, one per moment: alternately the time of the grant and the
-- cost, as text in a field of the identifier's hash. The Rust twins are concurrency.rs and
-- entries.rs in ratelimit-core. README.md beside this file specifies a twin as a table and the
-- helpers.

local NAME = 'concurrency'
local concurrency = in_field { parameters = { 'limit', 'lease_us' }, settles = 'all' }

-- The words of the text: its name, then the times and costs.
function concurrency.read(key, field)
  local stored = read_field(key, field, NAME)
  if not stored then return nil end
  local words, length = { NAME, stored = stored }, #NAME
  for timestamp, cost in string.gmatch(stored, ' (%d+) (%d+)') do
    local count = #words
    words[count + 1], words[count + 2] = timestamp, cost
    length = length + 2 + #timestamp + #cost
    if integer(timestamp) > MOST or integer(cost) > MOST then error(CORRUPT) end
  end
  if length ~= #stored or length == #NAME then error(CORRUPT) end
  return words
end

function concurrency.change(limit, state, operation, cost, made)
  -- A time before the newest lease counts as the time of that lease.
  local leases, at, used, changed = { NAME }, now, 0, cost > 0
  if state then at = math.max(now, state[#state - 1]) end
  for place = 2, state and #state or 0, 2 do
    if state[place] + limit.lease_us > at then
      local count = #leases
      leases[count + 1], leases[count + 2] = state[place], state[place + 1]
      used = used + state[place + 1]
    end
  end
  -- Takes so much off a lease, which may end.
  local function take(place, of_cost)
    local rest = leases[place + 1] - of_cost
    if rest > 0 then
      leases[place + 1] = format('%d', rest)
    else
      table.remove(leases, place)
      table.remove(leases, place)
    end
  end
  local function grant(of_cost)
    local count = #leases
    if count > 1 and leases[count - 1] + 0 == at then
      leases[count] = format('%d', leases[count] + of_cost)
    else
      leases[count + 1], leases[count + 2] = format('%d', at), format('%d', of_cost)
    end
  end
  if made then
    -- The lease of that moment ends, or starts again.
    changed = false
    for place = 2, cost > 0 and #leases or 0, 2 do
      if leases[place] + 0 == made then
        changed = true
        local taken = math.min(cost, leases[place + 1])
        take(place, taken)
        if operation == 'renew' then grant(taken) end
        break
      end
    end
  elseif operation == 'give' then
    -- The newest leases end.
    changed = changed and used > 0
    while cost > 0 and #leases > 1 do
      local place = #leases - 1
      local taken = math.min(cost, leases[place + 1])
      take(place, taken)
      cost = cost - taken
    end
  else
    local left = math.max(limit.limit - used, 0)
    if operation == 'force' then
      cost = math.min(cost, left)
    elseif cost > left then
      return false, nil, nil, nil, at
    end
    changed = cost > 0
    if changed then grant(cost) end
  end
  if not changed then return true, nil, nil, nil, at end
  if #leases == 1 then return true, 'remove', nil, nil, at end
  return true, 'put', table.concat(leases, ' '), leases[#leases - 1] + limit.lease_us, at
end

return concurrency
