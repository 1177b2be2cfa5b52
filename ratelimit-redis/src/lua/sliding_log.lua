-- The sliding log: an entry per admitted request until it is a window old.
--
-- The state is a sorted set with one member per moment: its score is the time, its text "COST TOTAL".
-- TOTAL is the cost admitted up to and including this entry (a prefix sum), which wraps around at 2^52.
-- The difference of two totals is the cost between them, so a request reads only a few entries, however
-- long the log is. The Rust twin is sliding_log.rs in ratelimit-core. README.md beside this file
-- specifies a twin as a table and the helpers.

local sliding_log = { own_key = true }
sliding_log.parameters = { 'limit', 'window_us' }

local PRUNED_PER_CALL = 100
local MOVED_PER_CALL = 100

-- The entry at a rank: the oldest is 0, the newest -1.
local function entry_at(key, rank)
  local member, score = unpack(redis.call('ZRANGE', key, rank, rank, 'WITHSCORES'))
  if not member then return nil end
  local cost, total = string.match(member, '^(%d+) (%d+)$')
  cost, total = cost and integer(cost), total and integer(total)
  local timestamp = tonumber(score)
  -- A foreign score may be no time: inf, a fraction, or a number beyond all times.
  if not (cost and total and timestamp >= 0 and timestamp <= MOST and math.fmod(timestamp, 1) == 0) then
    error(CORRUPT)
  end
  return { member = member, timestamp = timestamp, cost = cost, total = total }
end

-- The log stays on the server; a step starts with the newest entry.
function sliding_log.read(key)
  local last = entry_at(key, -1)
  return last and { key = key, last = last }
end

-- The entries that still count: those from rank `stale` on, with cost `used` in total.
local function live(limit, log, now)
  if not log then return { at = now, used = 0 } end
  -- A time before the newest entry counts as the time of that entry.
  local at = math.max(now, log.last.timestamp)
  if log.last.timestamp + limit.window_us <= at then return { at = at, used = 0, newest = log.last } end
  local stale = redis.call('ZCOUNT', log.key, '-inf', text(at - limit.window_us))
  local first = entry_at(log.key, stale)
  local before = around(first.total - first.cost)
  return {
    key = log.key,
    at = at,
    stale = stale,
    before = before,
    used = around(log.last.total - before),
    first = first,
    last = log.last,
    newest = log.last,
  }
end

-- Binary search: the rank of the entry at which the oldest entries reach the cost `excess`; `last` if
-- none before it does.
local function rank_of(entries, excess, last)
  local low, high = entries.stale or 0, last
  while low < high do
    local middle = floor_div(low + high, 2)
    if around(entry_at(entries.key, middle).total - entries.before) >= excess then
      high = middle
    else
      low = middle + 1
    end
  end
  return low
end

-- The time at which the oldest entries with a cost of at least `excess` have expired.
local function freed_us(limit, entries, excess)
  local rank = rank_of(entries, excess, redis.call('ZCARD', entries.key) - 1)
  return entry_at(entries.key, rank).timestamp + limit.window_us
end

-- The time of the entry after whose end more remains, if `used` counts together with a charge made now. More may
-- count than a limit that was lowered has room for.
local function next_timestamp(limit, entries, used)
  if used > limit.limit then
    return freed_us(limit, entries, used - limit.limit + 1) - limit.window_us
  end
  return entries.first and entries.first.timestamp or entries.at
end

-- `next` is the time of the entry after whose end more remains, `last` that of the newest entry.
local function decision(limit, now, used, next, last, retry_us)
  return {
    allowed = retry_us == 0,
    remaining = math.max(limit.limit - used, 0),
    retry_after_us = retry_us,
    replenish_after_us = used == 0 and 0 or next + limit.window_us - now,
    reset_after_us = used == 0 and 0 or last + limit.window_us - now,
  }
end

local function unchanged(limit, now, entries, retry_us)
  local used, last = entries.used, entries.last
  return decision(limit, now, used, next_timestamp(limit, entries, used), last and last.timestamp, retry_us)
end

local function charged(limit, now, entries, charge)
  if charge == 0 then return unchanged(limit, now, entries, 0) end
  local used = entries.used + charge
  local answer = decision(limit, now, used, next_timestamp(limit, entries, used), entries.at, 0)
  return answer, 'put', { entries = entries, charge = charge }, entries.at + limit.window_us
end

function sliding_log.step(limit, log, now, cost)
  local entries = live(limit, log, now)
  if cost > math.max(limit.limit - entries.used, 0) then
    local retry_us = NEVER
    if cost <= limit.limit then
      retry_us = freed_us(limit, entries, entries.used + cost - limit.limit) - now
    end
    return unchanged(limit, now, entries, retry_us)
  end
  return charged(limit, now, entries, cost)
end

function sliding_log.force(limit, log, now, cost)
  local entries = live(limit, log, now)
  return charged(limit, now, entries, math.min(cost, math.max(limit.limit - entries.used, 0)))
end

-- Takes the cost off the newest entries: a refund undoes the latest charges.
function sliding_log.refund(limit, log, now, cost)
  local entries = live(limit, log, now)
  local last = entries.last
  if cost == 0 or entries.used == 0 then return unchanged(limit, now, entries, 0) end
  if cost >= entries.used then return decision(limit, now, 0, nil, nil, 0), 'remove' end
  local gone, owed, rank = {}, cost, -1
  while last.cost <= owed do
    gone[#gone + 1] = last.member
    owed = owed - last.cost
    rank = rank - 1
    last = entry_at(entries.key, rank)
  end
  local used = entries.used - cost
  local answer = decision(limit, now, used, next_timestamp(limit, entries, used), last.timestamp, 0)
  local change = { entries = entries, gone = gone, last = last, owed = owed }
  return answer, 'put', change, last.timestamp + limit.window_us
end

-- Takes the cost off the entry of that moment, and off the totals of the later entries. These are few:
-- they arrived while a batch waited for another slot. If there are more, nothing changes.
function sliding_log.undo(limit, log, now, timestamp, cost)
  local entries = live(limit, log, now)
  local last = entries.last
  if cost == 0 or entries.used == 0 then return unchanged(limit, now, entries, 0) end
  local rank = redis.call('ZCOUNT', entries.key, '-inf', text(timestamp)) - 1
  local entry = rank >= entries.stale and entry_at(entries.key, rank)
  local count = redis.call('ZCARD', entries.key)
  local moved = entry and entry.timestamp == timestamp and entry.cost >= cost and count - rank - 1
  if not moved or moved > MOVED_PER_CALL then return unchanged(limit, now, entries, 0) end
  if cost >= entries.used then return decision(limit, now, 0, nil, nil, 0), 'remove' end
  local change = { entries = entries, undone = { entry }, owed = cost }
  for later = rank + 1, count - 1 do
    change.undone[#change.undone + 1] = entry_at(entries.key, later)
  end
  if moved == 0 and entry.cost == cost then last = entry_at(entries.key, rank - 1) end
  local used = entries.used - cost
  -- From the undone entry on, each total will be less by the cost.
  local excess = math.max(used - limit.limit, 0) + 1
  local next_rank = rank_of(entries, excess, count - 1)
  if next_rank >= rank then
    next_rank = math.max(rank, rank_of(entries, excess + cost, count - 1))
  end
  local answer = decision(limit, now, used, entry_at(entries.key, next_rank).timestamp, last.timestamp, 0)
  return answer, 'put', change, last.timestamp + limit.window_us
end

-- The wait until `cost` fits, `excess` of which is too much. A charge made now follows `entries`.
local function wait_us(limit, entries, now, excess)
  -- A charge made now comes after all entries.
  local newest = entries.last and redis.call('ZCARD', entries.key) or 0
  local rank = rank_of(entries, excess, newest)
  local timestamp = rank < newest and entry_at(entries.key, rank).timestamp or entries.at
  return timestamp + limit.window_us - now
end

-- The wait until `cost` fits once more after it is charged now.
function sliding_log.wait_us(limit, log, now, cost)
  -- Even if more is used than the limit, because it was larger before.
  if cost == 0 then return 0 end
  local entries = live(limit, log, now)
  local excess = entries.used + 2 * cost - limit.limit
  if excess <= 0 then return 0 end
  return wait_us(limit, entries, now, excess)
end

-- Records the charge at its time and drops the oldest cost, entries in part if necessary, down to
-- exactly full, or to as much as a larger limit wrote.
function sliding_log.fill(limit, log, now, charge, cost)
  if charge == 0 then return nil end
  local entries = live(limit, log, now)
  local full = math.max(limit.limit, entries.used)
  local excess = entries.used + charge - full
  local count = entries.last and redis.call('ZCARD', entries.key) or 0
  local change = { entries = entries, charge = charge, filled = true }
  change.first = rank_of(entries, excess + 1, count)
  change.oldest = change.first < count and entry_at(entries.key, change.first) or nil
  if change.oldest then
    change.rest = around(change.oldest.total - entries.before) - excess
  end
  local retry_us = cost <= limit.limit and wait_us(limit, entries, now, excess + full - limit.limit + cost) or NEVER
  local next = change.oldest and change.oldest.timestamp or entries.at
  if full > limit.limit then
    local rank = rank_of(entries, excess + full - limit.limit + 1, count)
    next = rank < count and entry_at(entries.key, rank).timestamp or entries.at
  end
  local answer = decision(limit, now, full, next, entries.at, retry_us)
  return 'put', change, entries.at + limit.window_us, answer
end

local function add(key, timestamp, cost, total)
  redis.call('ZADD', key, text(timestamp), text(cost) .. ' ' .. text(total))
end

function sliding_log.put(key, _, change, ttl_ms)
  local entries, stale = change.entries, change.entries.stale or 0
  if change.undone then
    for _, entry in ipairs(change.undone) do redis.call('ZREM', key, entry.member) end
    for i, entry in ipairs(change.undone) do
      local cost = i == 1 and entry.cost - change.owed or entry.cost
      if cost > 0 then add(key, entry.timestamp, cost, around(entry.total - change.owed)) end
    end
    if stale > 0 then redis.call('ZREMRANGEBYRANK', key, 0, stale - 1) end
  elseif change.gone then
    for _, member in ipairs(change.gone) do redis.call('ZREM', key, member) end
    if change.owed > 0 then
      local last = change.last
      redis.call('ZREM', key, last.member)
      add(key, last.timestamp, last.cost - change.owed, around(last.total - change.owed))
    end
    -- The newest entry may now be an older one, for which past entries must not count again.
    if stale > 0 then redis.call('ZREMRANGEBYRANK', key, 0, stale - 1) end
  else
    local last = entries.last
    if entries.newest and not last or change.filled and not change.oldest then
      redis.call('UNLINK', key) -- no entry counts any longer
      last = nil
    else
      local dropped = change.first or math.min(stale, PRUNED_PER_CALL)
      if dropped > 0 then redis.call('ZREMRANGEBYRANK', key, 0, dropped - 1) end
    end
    local oldest = change.oldest
    if oldest and change.rest < oldest.cost then
      redis.call('ZREM', key, oldest.member)
      add(key, oldest.timestamp, change.rest, oldest.total)
      last = entry_at(key, -1)
    end
    local total = around((entries.newest and entries.newest.total or 0) + change.charge)
    if last and last.timestamp == entries.at then
      redis.call('ZREM', key, last.member)
      add(key, last.timestamp, last.cost + change.charge, total)
    else
      add(key, entries.at, change.charge, total)
    end
  end
  expire(key, ttl_ms)
end

function sliding_log.remove(key)
  redis.call('UNLINK', key)
end

-- A charge goes into the newest entry.
function sliding_log.mark(log)
  return log.last.timestamp
end

return sliding_log
