-- The sliding log: an entry per admitted request until it is a window old.
--
-- The state is a sorted set with one member per moment: its score is the time, its text "COST
-- TOTAL". TOTAL is the cost admitted up to and including this entry (a prefix sum), which wraps
-- around at 2^52. The difference of two totals is the cost between them, so a request reads only a
-- few entries, however long the log is. The Rust twin is sliding_log.rs in ratelimit-core.
-- README.md beside this file specifies what each section receives and what it leaves.

--- fresh
local PRUNED_PER_CALL, MOVED_PER_CALL = 100, 100
-- The newest entry, and the oldest that counts, at rank `stale`; what had been admitted before it.
local newest, last_us, last_cost, total = nil, 0, 0, 0
local first_us, first_cost, stale, before = 0, 0, 0, 0

-- The entry at a rank: the oldest is 0, the newest -1. None if it is not after that time.
local function entry_at(rank, past_us)
  local entry = call('ZRANGE', key0, rank, rank, 'WITHSCORES')
  local us = entry[2] and entry[2] + 0
  if not us or past_us and us <= past_us then return nil end
  local cost, total = match(entry[1], '^(%d+) (%d+)$')
  cost, total = (cost or MOST * 4) + 0, (total or 0) + 0
  -- A foreign score may be no time: inf, a fraction, or a number beyond all times.
  if not (us >= 0 and us <= MOST and us % 1 == 0 and cost < 2 ^ 53 and total < 2 ^ 53) then error(CORRUPT0) end
  return entry[1], us, cost, total
end

local function add(us, cost, total)
  command('ZADD', key0, format('%d', us), format('%d %d', cost, total % 2 ^ 52))
end

--- read
newest, last_us, last_cost, total = entry_at(-1)
if newest then
  -- A time before the newest entry counts as the time of that entry.
  if last_us > at then at = last_us end
  if last_us + window_us > at then
    local past_us, oldest, cost, reached = at - window_us, nil, nil, nil
    oldest, first_us, cost, reached = entry_at(0, past_us)
    if not oldest then
      stale = call('ZCOUNT', key0, '-inf', format('%d', past_us))
      oldest, first_us, cost, reached = entry_at(stale)
    end
    first_cost, before = cost, (reached - cost) % 2 ^ 52
    used = (total - before) % 2 ^ 52
  end
else
  last_us, last_cost, total = 0, 0, 0
end

--- level
most = limit
left = used < limit and limit - used or 0

--- seen
-- The log as pairs of a time and a cost. Of its entries, only those count whose times a decision
-- depends on: the oldest, the newest, and those at which the oldest entries reach some costs. The
-- others go with the next of these.
if used > 0 then
  seen = format('sliding-log %d %d', first_us, first_cost)
  local shown, over, reached = first_cost, used > limit and used - limit or 0, {}
  -- What ends before more remains, and before the cost fits.
  if used + cost0 > limit then reached = { over + 1, used + cost0 - limit } end
  if operation == 'refund' then
    reached = { over + 1, used + cost0 - limit, used - cost0, math.max(used - cost0 - limit, 0) + 1 }
  elseif attempts0 then
    -- And before it fits once more, or after the oldest entries have made way for it.
    local dropped = used + math.min(cost0, most) - limit - over
    local fits = used + cost0 - limit
    reached = { over + 1, fits, fits + cost0, dropped + 1, dropped + over + 1, dropped + over + cost0 }
  end
  if reached[1] then table.sort(reached) end
  for _, sum in ipairs(reached) do
    if sum > first_cost and sum <= used then
      local rank = first_for(stale, call('ZCARD', key0) - 1, function(rank)
        local _, _, _, reached = entry_at(rank)
        return (reached - before) % 2 ^ 52 >= sum
      end)
      local _, us, _, reached = entry_at(rank)
      local until_it = (reached - before) % 2 ^ 52
      if until_it ~= shown then seen = seen .. format(' %d %d', us, (until_it - shown) % 2 ^ 52) end
      shown = until_it
    end
  end
  if shown ~= used then seen = seen .. format(' %d %d', last_us, (used - shown) % 2 ^ 52) end
end

--- charge
expires = at + window_us
if act0 == 'full' or newest and used == 0 then
  -- No entry counts any longer.
  command('UNLINK', key0)
elseif stale > 0 then
  command('ZREMRANGEBYRANK', key0, 0, math.min(stale, PRUNED_PER_CALL) - 1)
end
if used > 0 and last_us == at then
  command('ZREM', key0, newest)
  add(at, last_cost + charge, total + charge)
else
  add(at, charge, total + charge)
end
-- A charge goes into the newest entry.
mark0 = at

--- fill
-- Records the charge at its time and drops the oldest cost, entries in part if necessary, down to
-- exactly full, or to as much as a larger limit wrote.
local excess = used + charge - math.max(limit, used)
local count = used > 0 and call('ZCARD', key0) or 0
local rank = used > 0 and first_for(stale, count, function(rank)
  local _, _, _, reached = entry_at(rank)
  return (reached - before) % 2 ^ 52 > excess
end) or 0
if rank < count then
  local member, us, cost, reached = entry_at(rank)
  local rest = (reached - before) % 2 ^ 52 - excess
  if rank > 0 then command('ZREMRANGEBYRANK', key0, 0, rank - 1) end
  if rest < cost then
    command('ZREM', key0, member)
    add(us, rest, reached)
    if member == newest then newest, last_cost = format('%d %d', rest, reached), rest end
  end
elseif newest then
  command('UNLINK', key0)
end
if rank < count and last_us == at then
  command('ZREM', key0, newest)
  add(at, last_cost + charge, total + charge)
else
  add(at, charge, total + charge)
end
expires, mark0 = at + window_us, at

--- give
-- Takes the cost off the newest entries: a refund undoes the latest charges.
local rank, member, us, cost, reached = -1, newest, last_us, last_cost, total
while cost <= charge do
  command('ZREM', key0, member)
  charge, rank = charge - cost, rank - 1
  member, us, cost, reached = entry_at(rank)
  if not member then error(CORRUPT0) end
end
if charge > 0 then
  command('ZREM', key0, member)
  add(us, cost - charge, reached - charge)
end
-- The newest entry may now be an older one, for which past entries must not count again.
if stale > 0 then command('ZREMRANGEBYRANK', key0, 0, stale - 1) end
expires = us + window_us

--- undo
-- Takes the cost off the entry of that moment, and off the totals of the later entries. These are
-- few: they arrived while a batch waited for another slot. If there are more, nothing changes.
local rank = used > 0 and call('ZCOUNT', key0, '-inf', format('%d', made)) - 1 or -1
local count = used > 0 and call('ZCARD', key0) or 0
local member, us, cost, reached = nil, nil, nil, nil
if rank >= stale then member, us, cost, reached = entry_at(rank) end
act0 = nil
if member and us == made and cost >= charge and count - rank - 1 <= MOVED_PER_CALL then
  wrote0 = charge >= used and 'remove' or 'put'
  if wrote0 == 'put' then
    local later = {}
    for place = rank + 1, count - 1 do later[#later + 1] = { entry_at(place) } end
    command('ZREM', key0, member)
    for _, entry in ipairs(later) do command('ZREM', key0, entry[1]) end
    if cost > charge then add(us, cost - charge, reached - charge) end
    for _, entry in ipairs(later) do add(entry[2], entry[3], entry[4] - charge) end
    if stale > 0 then command('ZREMRANGEBYRANK', key0, 0, stale - 1) end
    expires = last_us + window_us
  end
end
