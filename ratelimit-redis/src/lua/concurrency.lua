-- The concurrency limit: at most so many leases at the same time, each for a limited time.
--
-- The state is the leases, oldest first, one per moment: alternately the time of the grant and the cost,
-- as text in a field of the identifier's hash. The Rust twins are concurrency.rs and entries.rs in
-- ratelimit-core. README.md beside this file specifies a twin as a table and the helpers.

local concurrency = number_pairs('concurrency', 'timestamp', 'cost')
concurrency.parameters = { 'limit', 'lease_us' }

-- The time at which a lease ends.
local function end_us(limit, lease)
  return lease.timestamp + limit.lease_us
end

local function sum(leases)
  local total = 0
  for _, lease in ipairs(leases) do total = total + lease.cost end
  return total
end

-- The leases that have not ended.
local function live(limit, state, now)
  local leases = state or {}
  -- A time before the newest lease counts as the time of that lease.
  local at = #leases > 0 and math.max(now, leases[#leases].timestamp) or now
  local live = {}
  for _, lease in ipairs(leases) do
    if end_us(limit, lease) > at then live[#live + 1] = lease end
  end
  return { at = at, leases = live, used = sum(live) }
end

-- The time at which the oldest leases with a cost of at least `excess` have ended.
local function freed_us(limit, leases, excess)
  local freed = 0
  for _, lease in ipairs(leases) do
    freed = freed + lease.cost
    if freed >= excess then return end_us(limit, lease) end
  end
end

local function decision(limit, now, leases, retry_us)
  local last, used = leases[#leases], sum(leases)
  local grown_us = last and freed_us(limit, leases, math.max(used - limit.limit, 0) + 1)
  return {
    allowed = retry_us == 0,
    remaining = math.max(limit.limit - used, 0),
    retry_after_us = retry_us,
    replenish_after_us = grown_us and grown_us - now or 0,
    reset_after_us = last and end_us(limit, last) - now or 0,
  }
end

local function changed(limit, now, leases)
  local answer = decision(limit, now, leases, 0)
  if #leases == 0 then return answer, 'remove' end
  return answer, 'put', leases, end_us(limit, leases[#leases])
end

-- Appends a lease.
local function add(seen, cost)
  local leases = seen.leases
  local last = leases[#leases]
  if last and last.timestamp == seen.at then
    leases[#leases] = { timestamp = last.timestamp, cost = last.cost + cost }
  else
    leases[#leases + 1] = { timestamp = seen.at, cost = cost }
  end
  return leases
end

local function charged(limit, now, seen, charge)
  if charge == 0 then return decision(limit, now, seen.leases, 0) end
  return changed(limit, now, add(seen, charge))
end

function concurrency.step(limit, state, now, cost)
  local seen = live(limit, state, now)
  if cost > math.max(limit.limit - seen.used, 0) then
    local retry_us = NEVER
    if cost <= limit.limit then
      retry_us = freed_us(limit, seen.leases, seen.used + cost - limit.limit) - now
    end
    return decision(limit, now, seen.leases, retry_us)
  end
  return charged(limit, now, seen, cost)
end

function concurrency.force(limit, state, now, cost)
  local seen = live(limit, state, now)
  return charged(limit, now, seen, math.min(cost, math.max(limit.limit - seen.used, 0)))
end

-- Ends the newest leases.
function concurrency.refund(limit, state, now, cost)
  local seen = live(limit, state, now)
  local leases = seen.leases
  if cost == 0 or #leases == 0 then return decision(limit, now, leases, 0) end
  local owed = cost
  while owed > 0 and #leases > 0 do
    local last = leases[#leases]
    local back = math.min(owed, last.cost)
    owed = owed - back
    leases[#leases] = last.cost > back and { timestamp = last.timestamp, cost = last.cost - back } or nil
  end
  return changed(limit, now, leases)
end

-- The time at which a lease granted at `now` counts as granted: that of the newest lease, if it is
-- later.
function concurrency.charged_at(_, state, now)
  return state and math.max(now, state[#state].timestamp) or now
end

-- Subtracts a reservation from the lease of its time, if that still exists; with `renewed`, grants it
-- again.
local function take(limit, state, now, reservation, renewed)
  local seen = live(limit, state, now)
  local leases, place = seen.leases, 1
  while leases[place] and leases[place].timestamp < reservation.timestamp do place = place + 1 end
  local lease = leases[place]
  if not lease or lease.timestamp > reservation.timestamp or reservation.cost == 0 then return decision(limit, now, leases, 0) end
  local taken = math.min(reservation.cost, lease.cost)
  if lease.cost > taken then
    leases[place] = { timestamp = lease.timestamp, cost = lease.cost - taken }
  else
    table.remove(leases, place)
  end
  if renewed then add(seen, taken) end
  return changed(limit, now, leases)
end

-- Releases the lease, whatever the settled cost.
function concurrency.settle(limit, state, now, reservation)
  return take(limit, state, now, reservation, false)
end

-- Restarts the lease.
function concurrency.renew(limit, state, now, reservation)
  return take(limit, state, now, reservation, true)
end

return concurrency
