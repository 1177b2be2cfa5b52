-- The bucketed window: a count per bucket, summed over several windows. A window of n buckets is the
-- current bucket and the n - 1 before it.
--
-- The state is the buckets with admitted cost, oldest first, as text in a field of the identifier's
-- hash: the total before all buckets, then per bucket its start and the TOTAL including it (prefix
-- sums). Totals wrap around at 2^52; the difference of two is the cost between them. All numbers have
-- the same width, so a request reads only a few of them, however many buckets there are. The Rust twin
-- is bucketed_window.rs in ratelimit-core. README.md beside this file specifies a twin as a table and
-- the helpers.

local bucketed_window = {}
bucketed_window.parameters = {
  'bucket_us', 'limit1', 'span1_us', 'limit2', 'span2_us', 'limit3', 'span3_us', 'limit4', 'span4_us',
}

local WIDTH = 17 -- of a number: a space and 16 digits

-- A number as it is stored.
local function wide(number)
  return string.format(' %016.0f', number)
end

local NAME = 'bucketed-window'

-- Numbers are validated where they are read, so the text as a whole is not scanned.
function bucketed_window.read(key, field)
  local stored = redis.call('HGET', key, field)
  if not stored then return nil end
  if string.sub(stored, 1, #NAME) ~= NAME then return read_field(key, field, NAME) end
  local count = ((#stored - #NAME) / WIDTH - 1) / 2
  if count < 1 or math.fmod(count, 1) ~= 0 then error(CORRUPT) end
  return { stored = stored, count = count }
end

function bucketed_window.put(key, field, state, ttl_ms)
  redis.call('HSET', key, field, state.stored)
  expire(key, ttl_ms)
end

function bucketed_window.remove(key, field)
  redis.call('HDEL', key, field)
end

-- The offset of the number at a place; place 0 is the total before all buckets.
local function position(place)
  return #NAME + place * WIDTH + 1
end

local function number_at(state, place)
  local digits = string.sub(state.stored, position(place) + 1, position(place + 1) - 1)
  -- Lua accepts texts such as nan as numbers, so only digits pass.
  local number = string.match(digits, '^%d+$') and integer(digits)
  if not number then error(CORRUPT) end
  return number
end

-- The start of the n-th bucket.
local function start_of(state, n)
  return number_at(state, 2 * n - 1)
end

-- The total including the n-th bucket.
local function total_of(state, n)
  return number_at(state, 2 * n)
end

-- Binary search: the first n from `low` on for which `holds`, which once true stays true; `high` if
-- there is none.
local function first_for(low, high, holds)
  while low < high do
    local middle = floor_div(low + high, 2)
    if holds(middle) then high = middle else low = middle + 1 end
  end
  return low
end

local function aligned(limit, timestamp)
  return timestamp - math.fmod(timestamp, limit.bucket_us)
end

-- The time at which the n-th bucket leaves a window. Its start is aligned again, because it may belong
-- to buckets of another length.
local function end_us(limit, state, n, span_us)
  return aligned(limit, start_of(state, n)) + span_us
end

-- The view at `now`: the start of the current bucket (that of `now`, or the newest of the state if
-- later); per window its first bucket and its used cost; and the same of the longest window.
local function live(limit, state, now)
  state = state or { stored = NAME, count = 0 }
  local count = state.count
  local seen = { state = state, current = aligned(limit, now), windows = {}, span_us = 0 }
  if count > 0 then
    seen.current = math.max(seen.current, aligned(limit, start_of(state, count)))
    seen.total = total_of(state, count)
  end
  for n = 1, 4 do
    local most, span_us = limit['limit' .. n], limit['span' .. n .. '_us']
    if most > 0 then
      local first = first_for(1, count + 1, function(bucket)
        return end_us(limit, state, bucket, span_us) > seen.current
      end)
      local used = first <= count and around(seen.total - total_of(state, first - 1)) or 0
      seen.windows[n] = { limit = most, span_us = span_us, first = first, used = used }
      if span_us > seen.span_us then
        seen.span_us, seen.first, seen.used = span_us, first, used
      end
    end
  end
  return seen
end

-- The remaining cost that every window admits.
local function left(seen)
  local least = nil
  for _, window in ipairs(seen.windows) do
    local window_left = math.max(window.limit - window.used, 0)
    least = math.min(least or window_left, window_left)
  end
  return least
end

-- The time at which `cost` fits all windows; NEVER if it never does.
local function fits_us(limit, seen, cost)
  local state, fits = seen.state, seen.current
  for _, window in ipairs(seen.windows) do
    local room = window.limit - cost
    if room < 0 then return NEVER end
    if window.used > room then
      local last_to_go = first_for(window.first, state.count, function(bucket)
        return around(seen.total - total_of(state, bucket)) <= room
      end)
      fits = math.max(fits, end_us(limit, state, last_to_go, window.span_us))
    end
  end
  return fits
end

local function decision(limit, now, seen, retry_us)
  local remaining, shown = nil, nil
  for _, window in ipairs(seen.windows) do
    local window_left = math.max(window.limit - window.used, 0)
    if not remaining or window_left < remaining then
      remaining, shown = window_left, window.limit
    end
  end
  local count = seen.state.count
  -- The state may have a charge more than the windows were read with.
  local grown_us = fits_us(limit, live(limit, seen.state, now), remaining + 1)
  return {
    allowed = retry_us == 0,
    limit = shown,
    remaining = remaining,
    retry_after_us = retry_us,
    replenish_after_us = grown_us == NEVER and 0 or grown_us - now,
    reset_after_us = seen.used > 0 and end_us(limit, seen.state, count, seen.span_us) - now or 0,
  }
end

-- The buckets from the first visible one to the n-th, and one more.
local function with_bucket(seen, n, start, total)
  local state, first = seen.state, seen.first
  local before = first <= state.count and total_of(state, first - 1) or 0
  local between = string.sub(state.stored, position(2 * first - 1), position(2 * n + 1) - 1)
  local stored = NAME .. wide(before) .. between .. wide(start) .. wide(total)
  return { stored = stored, count = math.max(n - first + 1, 0) + 1 }
end

local function charged(limit, now, seen, charge)
  if charge == 0 then return decision(limit, now, seen, 0) end
  local state = seen.state
  if seen.used == 0 then
    seen.state = with_bucket(seen, 0, seen.current, charge)
  else
    local newest, total = start_of(state, state.count), around(seen.total + charge)
    local goes_on = aligned(limit, newest) >= seen.current
    seen.state = goes_on and with_bucket(seen, state.count - 1, newest, total)
      or with_bucket(seen, state.count, seen.current, total)
  end
  -- The current bucket belongs to every window.
  for _, window in ipairs(seen.windows) do window.used = window.used + charge end
  seen.used = seen.used + charge
  local ends_us = end_us(limit, seen.state, seen.state.count, seen.span_us)
  return decision(limit, now, seen, 0), 'put', seen.state, ends_us
end

function bucketed_window.step(limit, state, now, cost)
  local seen = live(limit, state, now)
  if cost > left(seen) then
    local fits = fits_us(limit, seen, cost)
    return decision(limit, now, seen, fits == NEVER and NEVER or fits - now)
  end
  return charged(limit, now, seen, cost)
end

function bucketed_window.force(limit, state, now, cost)
  local seen = live(limit, state, now)
  return charged(limit, now, seen, math.min(cost, left(seen)))
end

-- Charges the largest of the windows' limits.
function bucketed_window.filled(limit, _, now)
  local seen, most = live(limit, nil, now), 0
  for _, window in ipairs(seen.windows) do most = math.max(most, window.limit) end
  return charged(limit, now, seen, most)
end

-- Takes the cost off the newest buckets: a refund undoes the latest charges.
function bucketed_window.refund(limit, state, now, cost)
  local seen = live(limit, state, now)
  if cost == 0 or seen.used == 0 then return decision(limit, now, seen, 0) end
  if cost >= seen.used then return decision(limit, now, live(limit, nil, now), 0), 'remove' end
  -- Keep the buckets up to the one at which the remaining cost is reached.
  local stays = seen.used - cost
  local before = total_of(state, seen.first - 1)
  local newest = first_for(seen.first, state.count, function(bucket)
    return around(total_of(state, bucket) - before) >= stays
  end)
  local after =
    with_bucket(seen, newest - 1, start_of(state, newest), around(before + stays))
  -- Without its newest bucket the state may belong to an earlier time.
  local then_seen = live(limit, after, now)
  local ends_us = end_us(limit, after, after.count, then_seen.span_us)
  return decision(limit, now, then_seen, 0), 'put', after, ends_us
end

-- Counts the charge in the current bucket. Then each bucket, from the newest back, keeps as much as
-- every window that contains it has room for.
function bucketed_window.fill(limit, state, now, charge)
  if charge == 0 then return nil end
  local seen = live(limit, state, now)
  local buckets = {}
  for n = seen.first, seen.state.count do
    local count = around(total_of(seen.state, n) - total_of(seen.state, n - 1))
    buckets[#buckets + 1] = { start = start_of(seen.state, n), count = count }
  end
  local newest = buckets[#buckets]
  if newest and aligned(limit, newest.start) >= seen.current then
    newest.count = newest.count + charge
  else
    buckets[#buckets + 1] = { start = seen.current, count = charge }
  end
  local newer = 0
  for n = #buckets, 1, -1 do
    local bucket, least = buckets[n], MOST
    for _, window in ipairs(seen.windows) do
      if aligned(limit, bucket.start) + window.span_us > seen.current then
        -- A larger limit may have filled a window further.
        least = math.min(least, math.max(window.limit, window.used))
      end
    end
    bucket.count = math.min(bucket.count, math.max(least - newer, 0))
    newer = newer + bucket.count
  end
  local stored, total, count = { NAME, wide(0) }, 0, 0
  for _, bucket in ipairs(buckets) do
    if bucket.count > 0 then
      total, count = total + bucket.count, count + 1
      stored[#stored + 1] = wide(bucket.start) .. wide(total)
    end
  end
  local put = { stored = table.concat(stored), count = count }
  return 'put', put, end_us(limit, put, count, seen.span_us)
end

-- A charge goes into the newest bucket.
function bucketed_window.mark(state)
  return start_of(state, state.count)
end

return bucketed_window
