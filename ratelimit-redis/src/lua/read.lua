-- Returns the time and the states of some checks, and writes nothing: for a peek, a check that
-- costs nothing, and a cost that never fits. README.md beside this file specifies the reply.
--
--     KEYS: the key of each check. ARGV: the field of each.

local time = redis.call('TIME')
local answer = time[1] .. ' ' .. time[2] .. '\n=\n'
for check, key in ipairs(KEYS) do
  local seen = redis.call('HGET', key, ARGV[check]) or ''
  answer = answer .. #seen .. ':' .. seen
end
return answer
