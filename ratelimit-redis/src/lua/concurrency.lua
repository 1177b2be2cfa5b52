-- The concurrency limit: at most so many leases at the same time, each for a limited time.
--
-- The state is the leases, oldest first, one per moment: alternately the time of the grant and the
-- cost, as text in a field of the identifier's hash. The Rust twins are concurrency.rs and
-- entries.rs in ratelimit-core. README.md beside this file specifies what each section
-- receives and what it leaves.

--- fresh
local NAME = 'concurrency'
-- The text, and at which place the leases begin that are alive; and the newest.
local stored, alive, last_us, last_cost, last_place = nil, #NAME + 1, nil, 0, nil

-- The leases that are alive: alternately the time of the grant and the cost.
local function leases_alive()
  local leases = {}
  for us, cost in string.gmatch(string.sub(stored or '', alive), '(%d+) (%d+)') do
    local count = #leases
    leases[count + 1], leases[count + 2] = us + 0, cost + 0
  end
  return leases
end

local function leave(leases)
  local count = #leases
  if count == 0 then
    wrote0 = 'remove'
  else
    expires = leases[count - 1] + lease_us
    for place = 1, count do leases[place] = format(' %d', leases[place]) end
    text = NAME .. table.concat(leases)
  end
end

--- read
stored, kept0 = text_of(NAME)
while stored do
  local place, size = #NAME + 1, #stored
  used, alive = 0, place
  while place <= size do
    local us, cost, next = match(stored, '^ (%d+) (%d+)()', place)
    us, cost = (us or 2 ^ 53) + 0, (cost or 0) + 0
    if us > MOST or cost > MOST then error(CORRUPT0) end
    if us + lease_us > at then used = used + cost elseif used == 0 then alive = next end
    last_us, last_cost, last_place, place = us, cost, place, next
  end
  if not last_us then error(CORRUPT0) end
  -- A time before the newest lease counts as the time of that lease.
  if last_us <= at then break end
  at = last_us
end

--- level
most, at0 = limit, at
left = used < limit and limit - used or 0

--- seen
seen = stored or ''

--- charge
local merges = used > 0 and last_us == at
local before = used > 0 and string.sub(stored, alive, merges and last_place - 1 or -1) or ''
text = NAME .. before .. format(' %d %d', at, merges and last_cost + charge or charge)
expires = at + lease_us

--- give
-- The newest leases end.
local leases = leases_alive()
while charge > 0 and #leases > 0 do
  local count = #leases
  local taken = math.min(charge, leases[count])
  leases[count], charge = leases[count] - taken, charge - taken
  if leases[count] == 0 then leases[count], leases[count - 1] = nil, nil end
end
leave(leases)

--- undo
act0 = 'settle'

--- renew
-- The lease of that moment ends, or starts again.
local leases, taken = leases_alive(), nil
for place = 1, #leases, 2 do
  if leases[place] == made then
    taken = math.min(charge, leases[place + 1])
    leases[place + 1] = leases[place + 1] - taken
    if leases[place + 1] == 0 then
      table.remove(leases, place)
      table.remove(leases, place)
    end
    break
  end
end
if taken and act0 == 'renew' then
  local count = #leases
  if count > 0 and leases[count - 1] == at then
    leases[count] = leases[count] + taken
  else
    leases[count + 1], leases[count + 2] = at, taken
  end
end
if taken then leave(leases) else wrote0 = nil end
