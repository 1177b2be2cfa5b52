-- The sliding log: an entry per admitted request until it is a window old.
--
-- The state is a sorted set with one member per moment: its score is the time, its text "COST
-- TOTAL". TOTAL is the cost admitted up to and including this entry (a prefix sum), which wraps
-- around at 2^52. The difference of two totals is the cost between them, so a request reads only a
-- few entries, however long the log is. The Rust twin is sliding_log.rs in ratelimit-core.
-- README.md beside this file specifies a twin as a table and the helpers.

local sliding_log = { parameters = { 'limit', 'window_us' } }

local PRUNED_PER_CALL = 100
local MOVED_PER_CALL = 100

-- The entry at a rank: the oldest is 0, the newest -1.
local function entry_at(key, rank)
  local member, score = unpack(call('ZRANGE', key, rank, rank, 'WITHSCORES'))
  if not member then return nil end
  local cost, total = match(member, '^(%d+) (%d+)$')
  local timestamp = tonumber(score)
  -- A foreign score may be no time: inf, a fraction, or a number beyond all times.
  if not (timestamp >= 0 and timestamp <= MOST and timestamp % 1 == 0) then error(CORRUPT) end
  return { member = member, timestamp = timestamp, cost = integer(cost), total = integer(total) }
end

-- The log stays on the server; a step starts with the newest entry.
function sliding_log.read(key)
  local last = entry_at(key, -1)
  return last and { key = key, last = last }
end

-- The entries that still count: those from rank `stale` on, with cost `used` in total. Read once.
local function live(limit, log)
  if not log then return { at = now, used = 0 } end
  if log.live then return log.live end
  -- A time before the newest entry counts as the time of that entry.
  local at = math.max(now, log.last.timestamp)
  if log.last.timestamp + limit.window_us <= at then return { at = at, used = 0, newest = log.last } end
  local stale = call('ZCOUNT', log.key, '-inf', format('%d', at - limit.window_us))
  local first = entry_at(log.key, stale)
  local before = around(first.total - first.cost)
  log.live = {
    key = log.key,
    at = at,
    stale = stale,
    before = before,
    used = around(log.last.total - before),
    first = first,
    last = log.last,
    newest = log.last,
  }
  return log.live
end

-- The rank of the entry at which the oldest entries reach the cost; `last` if none before it does.
local function rank_of(entries, cost, last)
  return first_for(entries.stale or 0, last, function(rank)
    return around(entry_at(entries.key, rank).total - entries.before) >= cost
  end)
end

-- The log as pairs of a time and a cost. Of its entries, only those count whose times a decision
-- depends on: the oldest, the newest, and those at which the oldest entries reach some costs. The
-- others go with the next of these.
function sliding_log.seen(limit, log, check)
  local entries = live(limit, log)
  local used, cost, over = entries.used, check.cost, math.max(entries.used - limit.limit, 0)
  if used == 0 then return '' end
  -- What ends before more remains, and before the cost fits.
  local reached = { over + 1, used + cost - limit.limit }
  if check.operation == 'refund' then
    reached[3], reached[4] = used - cost, math.max(used - cost - limit.limit, 0) + 1
  elseif check.attempt > 0 then
    -- And before it fits once more, or after the oldest entries have made way for it.
    local dropped = used + math.min(cost, check.attempt) - limit.limit - over
    reached[3] = reached[2] + cost
    reached[4], reached[5], reached[6] = dropped + 1, dropped + over + 1, dropped + over + cost
  end
  table.sort(reached)
  local shown, before = 'sliding-log', entries.before
  local function show(entry)
    if entry.total ~= before then
      shown = shown .. format(' %d %d', entry.timestamp, around(entry.total - before))
      before = entry.total
    end
  end
  show(entries.first)
  for _, sum in ipairs(reached) do
    if sum > entries.first.cost and sum <= used then
      show(entry_at(entries.key, rank_of(entries, sum, call('ZCARD', entries.key) - 1)))
    end
  end
  show(entries.last)
  return shown
end

local function charged(limit, entries, charge)
  if charge == 0 then return true end
  return true, 'put', { entries = entries, charge = charge }, entries.at + limit.window_us
end

-- Takes the cost off the newest entries: a refund undoes the latest charges.
local function give(limit, entries, cost)
  local last = entries.last
  if cost == 0 or entries.used == 0 then return true end
  if cost >= entries.used then return true, 'remove' end
  local changed, owed, rank = {}, cost, -1
  while last.cost <= owed do
    last.rest, changed[#changed + 1] = 0, last
    owed, rank = owed - last.cost, rank - 1
    last = entry_at(entries.key, rank)
  end
  if owed > 0 then last.rest, changed[#changed + 1] = last.cost - owed, last end
  return true, 'put', { entries = entries, changed = changed, owed = owed }, last.timestamp + limit.window_us
end

-- Takes the cost off the entry of that moment, and off the totals of the later entries. These are
-- few: they arrived while a batch waited for another slot. If there are more, nothing changes.
local function undo(limit, entries, cost, timestamp)
  if cost == 0 or entries.used == 0 then return true end
  local rank = call('ZCOUNT', entries.key, '-inf', format('%d', timestamp)) - 1
  local entry = rank >= entries.stale and entry_at(entries.key, rank)
  local count, last = call('ZCARD', entries.key), entries.last
  local moved = entry and entry.timestamp == timestamp and entry.cost >= cost and count - rank - 1
  if not moved or moved > MOVED_PER_CALL then return true end
  if cost >= entries.used then return true, 'remove' end
  local change = { entries = entries, changed = { entry }, owed = cost }
  entry.rest = entry.cost - cost
  for later = rank + 1, count - 1 do
    change.changed[#change.changed + 1] = entry_at(entries.key, later)
  end
  if moved == 0 and entry.cost == cost then last = entry_at(entries.key, rank - 1) end
  return true, 'put', change, last.timestamp + limit.window_us
end

-- Records the charge at its time and drops the oldest cost, entries in part if necessary, down to
-- exactly full, or to as much as a larger limit wrote.
local function fill(limit, entries, charge)
  if charge == 0 then return true end
  local excess = entries.used + charge - math.max(limit.limit, entries.used)
  local count = entries.last and call('ZCARD', entries.key) or 0
  local change = { entries = entries, charge = charge, filled = true }
  change.first = rank_of(entries, excess + 1, count)
  change.oldest = change.first < count and entry_at(entries.key, change.first) or nil
  if change.oldest then change.rest = around(change.oldest.total - entries.before) - excess end
  return true, 'put', change, entries.at + limit.window_us
end

function sliding_log.change(limit, log, operation, cost, made)
  local entries = live(limit, log)
  local left = math.max(limit.limit - entries.used, 0)
  if operation == 'give' then return give(limit, entries, cost) end
  if operation == 'undo' then return undo(limit, entries, cost, made) end
  if operation == 'fill' then return fill(limit, entries, cost) end
  if operation == 'force' then return charged(limit, entries, math.min(cost, left)) end
  if cost > left then return false end
  return charged(limit, entries, cost)
end

local function add(key, timestamp, cost, total)
  call('ZADD', key, format('%d', timestamp), format('%d %d', cost, total))
end

-- A changed entry keeps its `rest`, or else its whole cost; its total falls by what is `owed`.
function sliding_log.put(key, _, change, ttl)
  local entries, stale = change.entries, change.entries.stale or 0
  if change.changed then
    for _, entry in ipairs(change.changed) do call('ZREM', key, entry.member) end
    for _, entry in ipairs(change.changed) do
      local cost = entry.rest or entry.cost
      if cost > 0 then add(key, entry.timestamp, cost, around(entry.total - change.owed)) end
    end
    -- The newest entry may now be an older one, for which past entries must not count again.
    if stale > 0 then call('ZREMRANGEBYRANK', key, 0, stale - 1) end
  else
    local last = entries.last
    if entries.newest and not last or change.filled and not change.oldest then
      call('UNLINK', key) -- no entry counts any longer
      last = nil
    else
      local dropped = change.first or math.min(stale, PRUNED_PER_CALL)
      if dropped > 0 then call('ZREMRANGEBYRANK', key, 0, dropped - 1) end
    end
    local oldest = change.oldest
    if oldest and change.rest < oldest.cost then
      call('ZREM', key, oldest.member)
      add(key, oldest.timestamp, change.rest, oldest.total)
      last = entry_at(key, -1)
    end
    local total = around((entries.newest and entries.newest.total or 0) + change.charge)
    if last and last.timestamp == entries.at then
      call('ZREM', key, last.member)
      add(key, last.timestamp, last.cost + change.charge, total)
    else
      add(key, entries.at, change.charge, total)
    end
  end
  expire(key, ttl)
end

function sliding_log.remove(key)
  call('UNLINK', key)
end

-- A charge goes into the newest entry.
function sliding_log.mark(log)
  return log.last.timestamp
end

return sliding_log
