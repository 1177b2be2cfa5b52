-- Puts a record of a caller in the place of another, or of none, if that still stands. Answers 1,
-- 0 if another one stands, or 2 if the next one has ended already. Fields whose records have ended
-- go; the key lives as long as its longest record, and for ever if one stands for ever.
--
--     KEYS: the records of the caller. ARGV: the field; the record that is to stand, empty for
--           none; and the next one, empty for none.

local call, key, field, standing, put = redis.call, KEYS[1], ARGV[1], ARGV[2], ARGV[3]
local time = call('TIME')
local now = time[1] * 1000000 + time[2]
-- When a record ends. One of another version stays.
local function end_of(record)
  local at = string.match(record, '^1 (%d+) ')
  return at and at + 0
end

local put_ends = end_of(put)
if put_ends and now >= put_ends then return '2' end
local found = call('HGET', key, field) or ''
local ends = end_of(found)
if ends and now >= ends then found = '' end
if found ~= standing then return '0' end
-- Without memory, the server refuses the first command that writes.
if put ~= '' then call('HSET', key, field, put) else call('HDEL', key, field) end
local all, kept, longest = call('HGETALL', key), {}, 0
for n = 1, #all, 2 do
  local at = end_of(all[n + 1])
  if at and now >= at then
    call('HDEL', key, all[n])
  else
    kept[#kept + 1] = n
    longest = at and longest and math.max(longest, at)
  end
end
if #kept > 0 and longest then
  call('PEXPIRE', key, string.format('%d', math.ceil((longest - now) / 1000) + 1000))
elseif #kept > 0 and call('PTTL', key) >= 0 then
  call('DEL', key)
  for _, n in ipairs(kept) do call('HSET', key, all[n], all[n + 1]) end
end
return '1'
