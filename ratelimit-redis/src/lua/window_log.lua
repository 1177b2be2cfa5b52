-- The window log: a window that begins with the first request, and remembers who used it up.
--
-- The state is a list under a key of its own: an element for each request, "TICK COST TOTAL START
-- METADATA", oldest first. TOTAL is what has been charged in the window up to and with it, and START
-- when the window began, so that the newest element is all that a decision reads. METADATA is whatever
-- the caller gave, any bytes. The Rust twin is window_log.rs in ratelimit-core. What a twin as a table
-- is made of, and where the helpers come from, stands in README.md beside this file.

local window_log = {}
window_log.parameters = { 'limit', 'window_us' }

-- The element at an index, the oldest at 0 and the newest at -1.
local function element_at(key, index)
  local element = redis.call('LINDEX', key, index)
  if not element then return nil end
  local timestamp, cost, total, start, metadata =
    string.match(element, '^(%d+) (%d+) (%d+) (%d+) (.*)$')
  if not timestamp then error(CORRUPT) end
  return {
    timestamp = integer(timestamp) or error(CORRUPT),
    cost = integer(cost) or error(CORRUPT),
    total = integer(total) or error(CORRUPT),
    start = integer(start) or error(CORRUPT),
    metadata = metadata,
  }
end

-- The list stays on the server; the newest element is what a step begins with.
function window_log.read(key)
  local last = element_at(key, -1)
  return last and { key = key, start = last.start, timestamp = last.timestamp, used = last.total }
end

-- The window that a request at `now` falls into. A request from before its start, by a clock that
-- went back, falls into it too.
local function window(limit, log, now)
  if log and now < log.start + limit.window_us then
    -- A state written under a larger limit uses at most this limit: its first requests used it up.
    log.total = log.used
    log.used = math.min(log.used, limit.limit)
    return log
  end
  return { start = now, used = 0, past = log ~= nil }
end

local function decision(limit, now, cost, now_window, fits)
  local end_us = now_window.start + limit.window_us - now
  return {
    allowed = fits,
    remaining = limit.limit - now_window.used,
    retry_after_us = fits and 0 or cost > limit.limit and NEVER or end_us,
    replenish_after_us = now_window.used == 0 and 0 or end_us,
    reset_after_us = now_window.used == 0 and 0 or end_us,
  }
end

-- The window with one request of this cost added at the end.
local function with_entry(now_window, now, cost)
  return {
    start = now_window.start,
    timestamp = math.max(now, now_window.timestamp or now),
    used = now_window.used + cost,
    added = cost,
    goes_on = now_window.timestamp ~= nil,
    past = now_window.past,
  }
end

local function charged(limit, now, cost, now_window, charge)
  if charge == 0 then return decision(limit, now, cost, now_window, true) end
  local after = with_entry(now_window, now, charge)
  return decision(limit, now, cost, after, true), 'put', after, after.start + limit.window_us
end

function window_log.step(limit, log, now, cost)
  local now_window = window(limit, log, now)
  if cost > limit.limit - now_window.used then
    return decision(limit, now, cost, now_window, false)
  end
  return charged(limit, now, cost, now_window, cost)
end

-- The first element whose total is at least so much, found by halving, and its index.
local function element_of_total(key, total)
  local low, high = 0, redis.call('LLEN', key) - 1
  while low < high do
    local middle = floor_div(low + high, 2)
    if element_at(key, middle).total >= total then
      high = middle
    else
      low = middle + 1
    end
  end
  return element_at(key, low), low
end

-- Takes the cost off the newest entries: a refund undoes what was charged last.
function window_log.refund(limit, log, now, cost)
  local now_window = window(limit, log, now)
  if cost == 0 or now_window.used == 0 then
    return decision(limit, now, cost, now_window, true)
  end
  local left = math.max(now_window.total - cost, 0)
  local after = { start = now_window.start, used = math.min(left, limit.limit), total = left }
  local answer = decision(limit, now, cost, after, true)
  if left == 0 then return answer, 'remove' end
  local last, index = element_of_total(now_window.key, left)
  if last.total < left or last.total - last.cost >= left then error(CORRUPT) end
  after.last, after.index = last, index
  return answer, 'put', after, after.start + limit.window_us
end

function window_log.force(limit, log, now, cost)
  local now_window = window(limit, log, now)
  local left = limit.limit - now_window.used
  return charged(limit, now, cost, now_window, math.min(cost, left))
end

-- Charges a request that does not fit as far as there is room.
function window_log.fill(limit, log, now, charge)
  return select(2, window_log.force(limit, log, now, charge))
end

local function element(timestamp, cost, total, start, metadata)
  return text(timestamp) .. ' ' .. text(cost) .. ' ' .. text(total) .. ' ' .. text(start) .. ' ' .. metadata
end

function window_log.put(key, _, after, ttl_ms, metadata)
  local last = after.last
  if last then
    local cost = last.cost - (last.total - after.total)
    redis.call('LTRIM', key, 0, after.index)
    redis.call('LSET', key, -1, element(last.timestamp, cost, after.total, last.start, last.metadata))
  else
    local added = element(after.timestamp, after.added, after.used, after.start, metadata)
    if after.goes_on then
      redis.call('RPUSHX', key, added)
    else
      if after.past then redis.call('UNLINK', key) end
      redis.call('RPUSH', key, added)
    end
  end
  expire(key, ttl_ms)
end

function window_log.remove(key)
  redis.call('UNLINK', key)
end

-- A charge goes into the window that began then.
function window_log.mark(log)
  return log.start
end

return window_log
