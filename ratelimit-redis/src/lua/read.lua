-- Returns the time and the states of some checks, and writes nothing: for a peek, a check that costs
-- nothing, and a cost that never fits. README.md beside this file specifies the reply.
--
--     KEYS: the key of each check. ARGV: the field of each.

local time = redis.call('TIME')
local seen = { '=' .. time[1] .. ' ' .. time[2] }
for check, key in ipairs(KEYS) do
  seen[check + 1] = redis.call('HGET', key, ARGV[check]) or ''
end
return table.concat(seen, '\n')
