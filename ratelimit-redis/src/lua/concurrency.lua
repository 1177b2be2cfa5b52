-- The concurrency limit: at most so many leases at the same time, each for a limited time.
--
-- The state is the leases, oldest first, one per moment: alternately the time of the grant and the cost,
-- as text in a field of the identifier's hash. The Rust twins are concurrency.rs and entries.rs in
-- ratelimit-core. README.md beside this file specifies a twin as a table and the helpers.

local NAME = 'concurrency'
local concurrency = in_field { parameters = { 'limit', 'lease_us' }, settles = 'all' }

function concurrency.read(key, field)
  local stored = read_field(key, field, NAME)
  if not stored then return nil end
  local leases, length = { stored = stored }, #NAME
  for lease, timestamp, cost in string.gmatch(stored, '( (%d+) (%d+))') do
    leases[#leases + 1] = { timestamp = integer(timestamp), cost = integer(cost), text = lease }
    length = length + #lease
  end
  if length ~= #stored or length == #NAME then error(CORRUPT) end
  return leases
end

function concurrency.change(limit, state, operation, cost, made)
  -- A time before the newest lease counts as the time of that lease.
  local leases, at, used, changed = {}, now, 0, cost > 0
  if state then at = math.max(now, state[#state].timestamp) end
  for _, lease in ipairs(state or {}) do
    if lease.timestamp + limit.lease_us > at then
      leases[#leases + 1] = lease
      used = used + lease.cost
    end
  end
  -- An unchanged lease is written as it was read; a changed one is a new table.
  local function lease_of(timestamp, of_cost, position)
    if of_cost > 0 then table.insert(leases, position, { timestamp = timestamp, cost = of_cost }) end
  end
  local function grant(of_cost)
    local last = leases[#leases]
    if last and last.timestamp == at then of_cost = of_cost + table.remove(leases).cost end
    lease_of(at, of_cost, #leases + 1)
  end
  if made then
    -- The lease of that moment ends, or starts again.
    changed = false
    for position, lease in ipairs(leases) do
      if lease.timestamp == made and cost > 0 then
        changed = true
        local taken = math.min(cost, lease.cost)
        table.remove(leases, position)
        lease_of(made, lease.cost - taken, position)
        if operation == 'renew' then grant(taken) end
        break
      end
    end
  elseif operation == 'give' then
    -- The newest leases end.
    changed = changed and used > 0
    while cost > 0 and #leases > 0 do
      local last = table.remove(leases)
      lease_of(last.timestamp, last.cost - cost, #leases + 1)
      cost = cost - last.cost
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
  if #leases == 0 then return true, 'remove', nil, nil, at end
  local words = { NAME }
  for i, lease in ipairs(leases) do
    words[i + 1] = lease.text or format(' %d %d', lease.timestamp, lease.cost)
  end
  return true, 'put', table.concat(words), leases[#leases].timestamp + limit.lease_us, at
end

return concurrency
