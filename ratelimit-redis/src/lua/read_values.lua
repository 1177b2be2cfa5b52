-- Returns the time, in seconds and microseconds, and the values of several keys at that moment. Those that are not there are
-- false.
--
--     KEYS: the keys, each once.

local answer = redis.call('TIME')
for i, key in ipairs(KEYS) do
  local value = redis.pcall('GET', key)
  if type(value) == 'table' then return value end
  answer[i + 2] = value
end
return answer
