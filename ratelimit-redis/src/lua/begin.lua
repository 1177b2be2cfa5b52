-- The start of the scripts that decide. The first argument is empty, or a time in microseconds
-- with, as the second, by how many milliseconds keys live longer. Sets `now`; the time as the reply
-- tells it; and the index of the first argument after these.

local call, match, format, byte = redis.call, string.match, string.format, string.byte
local ceil, floor = math.ceil, math.floor
local pcall0, pack0, unpack0, may0 = redis.pcall, struct.pack, struct.unpack, redis.acl_check_cmd
local now, padding_ms, time0, first0
if ARGV[1] == '' then
  local t = call('TIME')
  now = t[1] * 1000000 + t[2]
  if now >= 2^52 - 1 then return redis.error_reply('RLTIME ' .. format('%d', now)) end
  time0, first0 = t[1] .. ' ' .. t[2] .. '\n', 2
else
  now, padding_ms, time0, first0 = ARGV[1] + 0, ARGV[2] + 0, '\n', 3
end
