-- Compare-and-set: writes several keys if none has changed since it was read, for algorithms stepped in
-- Rust.
--
--     KEYS: the keys, each once; then the reply cache's key, if there is one.
--     ARGV: how many ms the reply is cached, or '0'; then five per key: '1' and the value that was read, or '0' and
--           any text if there was none; the change: '' or 'put' or 'remove'; the value and its time to live in ms.
--
-- Returns 1, or 0 if a key has changed and nothing was written.

local remembered_ms = tonumber(ARGV[1])
local count = remembered_ms > 0 and #KEYS - 1 or #KEYS
-- A client that may repeat a request gets the first reply again.
if remembered_ms > 0 and redis.call('EXISTS', KEYS[#KEYS]) == 1 then return 1 end

for i = 1, count do
  local found = redis.call('GET', KEYS[i])
  local read = ARGV[5 * i - 3] == '1' and ARGV[5 * i - 2]
  if found ~= read then return 0 end
end
for i = 1, count do
  local change = ARGV[5 * i - 1]
  if change == 'put' then
    redis.call('SET', KEYS[i], ARGV[5 * i], 'PX', ARGV[5 * i + 1])
  elseif change == 'remove' then
    redis.call('DEL', KEYS[i])
  end
end
if remembered_ms > 0 then redis.call('SET', KEYS[#KEYS], '1', 'PX', ARGV[1]) end
return 1
