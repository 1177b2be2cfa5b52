-- The bucketed window: a count per bucket, summed over several windows. A window of n buckets is
-- the current bucket and the n - 1 before it.
--
-- The state is the buckets with admitted cost, oldest first, as text in a field of the identifier's
-- hash: the total before all buckets, then per bucket its start and the TOTAL including it (prefix
-- sums). Totals wrap around at 2^52; the difference of two is the cost between them. All numbers
-- have the same width, so a request reads only a few of them, however many buckets there are. The
-- Rust twin is bucketed_window.rs in ratelimit-core. README.md beside this file specifies a twin as
-- a table and the helpers.

local bucketed_window = in_field {
  parameters = {
    'bucket_us', 'limit1', 'span1_us', 'limit2', 'span2_us', 'limit3', 'span3_us', 'limit4', 'span4_us',
  },
}

local NAME = 'bucketed-window'
local WIDTH = 17 -- of a number: a space and 16 digits

-- A number as it is stored.
local function wide(number)
  return format(' %016.0f', number)
end

-- Numbers are validated where they are read, so the text as a whole is not scanned.
function bucketed_window.read(key, field)
  local stored = read_field(key, field, NAME)
  if not stored then return nil end
  local count = ((#stored - #NAME) / WIDTH - 1) / 2
  if count < 1 or count % 1 ~= 0 then error(CORRUPT) end
  return { stored = stored, count = count }
end

-- The offset of the number at a place; place 0 is the total before all buckets.
local function position(place)
  return #NAME + place * WIDTH + 1
end

local function number_at(state, place)
  local word = string.sub(state.stored, position(place), position(place + 1) - 1)
  -- Lua accepts texts such as nan as numbers, so only digits pass.
  return integer(match(word, '^ (%d+)$'))
end

-- The start of the n-th bucket.
local function start_of(state, n)
  local start = number_at(state, 2 * n - 1)
  if start > MOST then error(CORRUPT) end
  return start
end

-- The total including the n-th bucket.
local function total_of(state, n)
  return number_at(state, 2 * n)
end

-- The time at which the n-th bucket leaves a window.
local function end_us(state, n, span_us)
  return start_of(state, n) + span_us
end

-- The view at `now`: the start of the current bucket (that of `now`, or the newest of the state if
-- later); per window its first bucket and its used cost; the same of the longest window; and what
-- every window has left.
local function live(limit, state)
  state = state or { stored = NAME, count = 0 }
  local count = state.count
  local seen = { state = state, current = now - now % limit.bucket_us, windows = {}, span_us = 0, left = MOST }
  if count > 0 then
    seen.current = math.max(seen.current, start_of(state, count))
    seen.total = total_of(state, count)
  end
  for n = 1, 4 do
    local most, span_us = limit['limit' .. n], limit['span' .. n .. '_us']
    if most > 0 then
      local first = first_for(1, count + 1, function(bucket)
        return end_us(state, bucket, span_us) > seen.current
      end)
      local used = first <= count and around(seen.total - total_of(state, first - 1)) or 0
      seen.windows[n] = { limit = most, span_us = span_us, first = first, used = used }
      seen.left = math.min(seen.left, math.max(most - used, 0))
      if span_us > seen.span_us then
        seen.span_us, seen.first, seen.used = span_us, first, used
      end
    end
  end
  return seen
end

-- The state with as many buckets as a decision depends on: the first that each window no longer
-- counts, the newest, and the last that has to leave each window before the cost fits, or before
-- more remains. The others go with the next of these.
function bucketed_window.seen(limit, state, check)
  local seen = live(limit, state)
  if seen.used == 0 then return '' end
  if check.operation == 'refund' or check.attempt > 0 then return state.stored end
  local shown = { state.count }
  local function show(bucket)
    if bucket >= seen.first then shown[#shown + 1] = bucket end
  end
  for _, window in ipairs(seen.windows) do
    show(window.first - 1)
    for _, room in ipairs { window.limit - check.cost, window.limit - seen.left - 1 } do
      if room >= 0 and window.used > room then
        show(first_for(window.first, state.count, function(bucket)
          return around(seen.total - total_of(state, bucket)) <= room
        end))
      end
    end
  end
  table.sort(shown)
  local words = { NAME .. wide(total_of(state, seen.first - 1)) }
  for n, bucket in ipairs(shown) do
    if bucket ~= shown[n - 1] then
      words[#words + 1] = string.sub(state.stored, position(2 * bucket - 1), position(2 * bucket + 1) - 1)
    end
  end
  return table.concat(words)
end

-- The buckets from the first visible one to the n-th, and one more.
local function with_bucket(seen, n, start, total)
  local state, first = seen.state, seen.first
  local before = first <= state.count and total_of(state, first - 1) or 0
  local between = string.sub(state.stored, position(2 * first - 1), position(2 * n + 1) - 1)
  local stored = NAME .. wide(before) .. between .. wide(start) .. wide(total)
  return { stored = stored, count = math.max(n - first + 1, 0) + 1 }
end

-- Writes a state, which matters until its newest bucket leaves the longest window.
local function put(seen, after)
  return true, 'put', after.stored, end_us(after, after.count, seen.span_us)
end

local function charged(seen, charge)
  local state = seen.state
  if charge == 0 then return true end
  if seen.used == 0 then return put(seen, with_bucket(seen, 0, seen.current, charge)) end
  local newest, total = start_of(state, state.count), around(seen.total + charge)
  if newest >= seen.current then
    return put(seen, with_bucket(seen, state.count - 1, newest, total))
  end
  return put(seen, with_bucket(seen, state.count, seen.current, total))
end

-- Takes the cost off the newest buckets: a refund undoes the latest charges.
local function give(seen, cost)
  local state = seen.state
  if cost == 0 or seen.used == 0 then return true end
  if cost >= seen.used then return true, 'remove' end
  -- Keep the buckets up to the one at which the remaining cost is reached.
  local stays, before = seen.used - cost, total_of(state, seen.first - 1)
  local newest = first_for(seen.first, state.count, function(bucket)
    return around(total_of(state, bucket) - before) >= stays
  end)
  return put(seen, with_bucket(seen, newest - 1, start_of(state, newest), around(before + stays)))
end

-- Counts the charge in the current bucket. Then each bucket, from the newest back, keeps as much as
-- every window that contains it has room for.
local function fill(seen, charge)
  if charge == 0 then return true end
  local buckets = {}
  for n = seen.first, seen.state.count do
    local count = around(total_of(seen.state, n) - total_of(seen.state, n - 1))
    buckets[#buckets + 1] = { start = start_of(seen.state, n), count = count }
  end
  local newest = buckets[#buckets]
  if newest and newest.start >= seen.current then
    newest.count = newest.count + charge
  else
    buckets[#buckets + 1] = { start = seen.current, count = charge }
  end
  local newer = 0
  for n = #buckets, 1, -1 do
    local bucket, least = buckets[n], MOST
    for _, window in ipairs(seen.windows) do
      if bucket.start + window.span_us > seen.current then
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
  return put(seen, { stored = table.concat(stored), count = count })
end

function bucketed_window.change(limit, state, operation, cost, made)
  local seen = live(limit, state)
  if operation == 'full' then
    -- The largest of the windows' limits.
    for _, window in ipairs(seen.windows) do cost = math.max(cost, window.limit) end
    return charged(seen, cost)
  end
  -- A charge went into the newest bucket, and is taken back from there.
  if operation == 'undo' and not (state and start_of(state, state.count) == made) then return true end
  if operation == 'give' or operation == 'undo' then return give(seen, cost) end
  if operation == 'fill' then return fill(seen, cost) end
  if operation == 'force' then return charged(seen, math.min(cost, seen.left)) end
  if cost > seen.left then return false end
  return charged(seen, cost)
end

function bucketed_window.mark(state)
  return start_of(state, state.count)
end

return bucketed_window
