-- The bucketed window: a count per bucket, summed over several windows. A window of n buckets is
-- the current bucket and the n - 1 before it.
--
-- The state is the buckets with admitted cost, oldest first, as text in a field of the identifier's
-- hash: the total before all buckets, then per bucket its start and the TOTAL including it (prefix
-- sums). Totals wrap around at 2^52; the difference of two is the cost between them. All numbers
-- have the same width, so a request reads only a few of them, however many buckets there are. The
-- Rust twin is bucketed_window.rs in ratelimit-core. README.md beside this file specifies what
-- each section receives and what it leaves.

--- fresh
local NAME = 'bucketed-window'
local WIDTH = 17 -- of a number: a space and 16 digits
-- The text, how many buckets it has, and the total including the newest.
local stored, count, total = NAME, 0, 0
-- The start of the current bucket: that of `now`, or the newest of the state if later.
local current = now - now % bucket_us
-- The limit, length, first bucket and used cost of each window; the longest; its first bucket.
local windows, longest_us, first = {}, 0, 1
local numbers = {}

-- A number as it is stored.
local function wide(number)
  return format(' %016.0f', number)
end

-- The offset of the number at a place; place 0 is the total before all buckets.
local function position(place)
  return #NAME + place * WIDTH + 1
end

-- Numbers are validated where they are read, so the text as a whole is not scanned.
local function number_at(place)
  local number = numbers[place]
  if not number then
    local digits = match(stored, '^ (%d+)', position(place))
    -- Lua accepts texts such as nan as numbers, so only digits pass.
    number = digits and #digits == WIDTH - 1 and digits + 0
    if not number or number >= 2 ^ 53 then error(CORRUPT0) end
    numbers[place] = number
  end
  return number
end

-- The start of the n-th bucket.
local function start_of(n)
  local start = number_at(2 * n - 1)
  if start > MOST then error(CORRUPT0) end
  return start
end

-- The cost in the buckets after the n-th, up to the newest.
local function after(n)
  return (total - number_at(2 * n)) % 2 ^ 52
end

-- The text of the buckets from one to another.
local function between(from, to)
  return string.sub(stored, position(2 * from - 1), position(2 * to + 1) - 1)
end

-- The buckets from the first visible one to the n-th, and one more. It matters until its newest
-- bucket leaves the longest window.
local function put_bucket(n, start, reached)
  local before = first <= count and string.sub(stored, position(2 * first - 2), position(2 * first - 1) - 1) or wide(0)
  text = NAME .. before .. between(first, n) .. wide(start) .. wide(reached)
  expires, mark0 = start + longest_us, start
end

--- read
local found
found, kept0 = text_of(NAME)
if found then
  stored, count = found, ((#found - #NAME) / WIDTH - 1) / 2
  if count < 1 or count % 1 ~= 0 then error(CORRUPT0) end
  current, total = math.max(current, start_of(count)), number_at(2 * count)
end

--- level
local function view(limit, span_us)
  if span_us == 0 then return end
  local from = count + 1
  local function counts(n)
    return start_of(n) + span_us > current
  end
  if count > 0 and counts(count) then
    from = count > 1 and counts(count - 1) and first_for(1, count - 1, counts) or count
  end
  local spent = from <= count and after(from - 1) or 0
  windows[#windows + 1] = { limit = limit, span_us = span_us, first = from, used = spent }
  most = math.min(most, limit)
  left = math.min(left, spent < limit and limit - spent or 0)
  if span_us > longest_us then longest_us, first, used = span_us, from, spent end
end
view(limit1, span1_us)
view(limit2, span2_us)
view(limit3, span3_us)
view(limit4, span4_us)

--- seen
-- The state with as many buckets as a decision depends on: the first that each window no longer
-- counts, the newest, and the last that has to leave each window before the cost fits, or before
-- more remains. The others go with the next of these.
if used > 0 and (operation == 'refund' or attempts0) then
  seen = stored
elseif used > 0 then
  local shown = { count }
  for _, window in ipairs(windows) do
    if window.first > first then shown[#shown + 1] = window.first - 1 end
    local room = window.limit - cost0
    for _ = 1, 2 do
      if room >= 0 and window.used > room then
        shown[#shown + 1] = first_for(window.first, count, function(n) return after(n) <= room end)
      end
      room = window.limit - left - 1
    end
  end
  table.sort(shown)
  seen = NAME .. string.sub(stored, position(2 * first - 2), position(2 * first - 1) - 1)
  for n, bucket in ipairs(shown) do
    if bucket ~= shown[n - 1] then seen = seen .. between(bucket, bucket) end
  end
end

--- charge
if act0 == 'full' then
  -- The largest of the windows' limits.
  for _, window in ipairs(windows) do charge = math.max(charge, window.limit) end
end
if used == 0 then
  first = count + 1
  put_bucket(0, current, charge)
elseif start_of(count) >= current then
  put_bucket(count - 1, start_of(count), (total + charge) % 2 ^ 52)
else
  put_bucket(count, current, (total + charge) % 2 ^ 52)
end

--- undo
-- A charge went into the newest bucket, and is taken back from there.
act0 = count > 0 and start_of(count) == made and 'give' or nil

--- give
-- Takes the cost off the newest buckets: a refund undoes the latest charges. Keeps the buckets up
-- to the one at which the remaining cost is reached.
local stays, before = used - charge, number_at(2 * first - 2)
local newest = first_for(first, count, function(n)
  return (number_at(2 * n) - before) % 2 ^ 52 >= stays
end)
put_bucket(newest - 1, start_of(newest), (before + stays) % 2 ^ 52)

--- fill
-- Counts the charge in the current bucket. Then each bucket, from the newest back, keeps as much as
-- every window that contains it has room for.
local buckets = {}
for n = first, count do
  buckets[#buckets + 1] = { start = start_of(n), count = (number_at(2 * n) - number_at(2 * n - 2)) % 2 ^ 52 }
end
local newest = buckets[#buckets]
if newest and newest.start >= current then
  newest.count = newest.count + charge
else
  buckets[#buckets + 1] = { start = current, count = charge }
end
local newer = 0
for n = #buckets, 1, -1 do
  local bucket, least = buckets[n], MOST
  for _, window in ipairs(windows) do
    if bucket.start + window.span_us > current then
      -- A larger limit may have filled a window further.
      least = math.min(least, math.max(window.limit, window.used))
    end
  end
  bucket.count = math.min(bucket.count, math.max(least - newer, 0))
  newer = newer + bucket.count
end
local reached = 0
text = NAME .. wide(0)
for _, bucket in ipairs(buckets) do
  if bucket.count > 0 then
    reached = reached + bucket.count
    text = text .. wide(bucket.start) .. wide(reached)
    expires, mark0 = bucket.start + longest_us, bucket.start
  end
end
