-- The concurrency limit: at most so many leases at the same time, each for a limited time.
--
-- The state is a sorted set with one member per moment: its score is the time of the grant, its
-- text "COST TIME". The member "sum" has the cost of all as a negative score, and so comes first: a
-- request reads only a few leases, however many there are. The Rust twins are concurrency.rs and
-- entries.rs in ratelimit-core. README.md beside this file specifies what each section
-- receives and what it leaves.

--- fresh
-- How many leases have ended; the newest.
local ended, newest, last_us, last_cost = 0, nil, nil, 0

-- The leases of these ranks, in their order. The sum has rank 0.
local function leases_at(first, last)
  local leases = {}
  for _, member in ipairs(call('ZRANGE', key0, first, last)) do
    if member ~= 'sum' then
      local cost, us = match(member, '^(%d+) (%d+)$')
      us, cost = (us or 2 ^ 53) + 0, (cost or 0) + 0
      if us > MOST or cost > MOST or cost == 0 then error(CORRUPT0) end
      leases[#leases + 1] = { member = member, us = us, cost = cost }
    end
  end
  return leases
end

-- How many leases were granted until then.
local function count_until(us)
  return call('ZCOUNT', key0, '-inf', format('%d', us)) - 1
end

local function lease_of(us)
  local rank = count_until(us)
  local lease = rank > ended and leases_at(rank, rank)[1]
  return lease and lease.us == us and lease
end

local function add(us, cost)
  command('ZADD', key0, format('%d', us), format('%d %d', cost, us))
end

-- Those that have ended go, and these are what all cost.
local function leave(sum)
  if ended > 0 then command('ZREMRANGEBYRANK', key0, 1, ended) end
  command('ZADD', key0, format('%d', -sum), 'sum')
end

--- read
local first = call('ZRANGE', key0, 0, 1, 'WITHSCORES')
if first[1] then
  local sum = -(tonumber(first[2]) or 0)
  if first[1] ~= 'sum' or sum < 1 or sum > MOST or sum % 1 ~= 0 then error(CORRUPT0) end
  local last = leases_at(-1, -1)[1]
  if not last then error(CORRUPT0) end
  newest, last_us, last_cost, used = last.member, last.us, last.cost, sum
  -- A time before the newest lease counts as the time of that lease.
  if last_us > at then at = last_us end
  if (tonumber(first[4]) or 0) + lease_us <= at then
    ended = count_until(at - lease_us)
    for _, lease in ipairs(leases_at(1, ended)) do used = used - lease.cost end
  end
  if used < 0 or (used == 0) ~= (last_us + lease_us <= at) then error(CORRUPT0) end
end

--- level
most, at0 = limit, at
left = used < limit and limit - used or 0

--- seen
-- The decision depends on the oldest leases, up to those that make way for the cost; on those that
-- the request ends; and on the newest that stays. All others count as if granted with one of these.
if used > 0 then
  local ends = act0 == 'settle' or act0 == 'renew'
  local oldest, latest = math.max(used - limit, 0) + 1, 1
  if ends then
    oldest, latest = oldest + charge, 2
  elseif operation == 'refund' then
    latest = cost0 + 1
  elseif cost0 <= limit then
    oldest = math.max(oldest, used + cost0 - limit)
  end
  local shown, rest = leases_at(ended + 1, ended + oldest), used
  local reached_us = shown[#shown].us
  if reached_us < last_us then
    local lease, later = ends and lease_of(made), leases_at(-latest, -1)
    if lease and lease.us > reached_us and lease.us < later[1].us then shown[#shown + 1] = lease end
    local count = #shown
    for _, lease in ipairs(later) do
      if lease.us > reached_us then shown[#shown + 1] = lease end
    end
    for _, lease in ipairs(shown) do rest = rest - lease.cost end
    if rest > 0 then
      local place = operation == 'refund' and count + 1 or #shown
      if ends and shown[place].us == made then place = place - 1 end
      shown[place].cost = shown[place].cost + rest
    end
  end
  local texts = { 'concurrency' }
  for place, lease in ipairs(shown) do texts[place + 1] = format('%d %d', lease.us, lease.cost) end
  seen = table.concat(texts, ' ')
end

--- charge
if act0 == 'full' then command('UNLINK', key0) end
leave(used + charge)
if used > 0 and last_us == at then
  command('ZREM', key0, newest)
  add(at, last_cost + charge)
else
  add(at, charge)
end
expires = at + lease_us

--- give
-- The newest leases end.
leave(used - charge)
local leases = leases_at(-charge, -1)
for place = #leases, 1, -1 do
  local lease = leases[place]
  local taken = math.min(charge, lease.cost)
  if taken > 0 then command('ZREM', key0, lease.member) end
  if taken > 0 and taken < lease.cost then add(lease.us, lease.cost - taken) end
  charge = charge - taken
end

--- undo
act0 = 'settle'

--- renew
-- The lease of that moment ends, or starts again.
local lease = used > 0 and lease_of(made)
local taken = lease and math.min(charge, lease.cost) or 0
if not lease then
  wrote0 = nil
elseif act0 == 'settle' and taken == used then
  wrote0 = 'remove'
else
  leave(act0 == 'settle' and used - taken or used)
  command('ZREM', key0, lease.member)
  if taken < lease.cost then add(made, lease.cost - taken) end
  if act0 == 'renew' then
    -- Perhaps together with the newest.
    local there = made == at and lease.cost - taken or last_us == at and last_cost or 0
    if there > 0 then command('ZREM', key0, format('%d %d', there, at)) end
    add(at, there + taken)
    expires = at + lease_us
  end
end
