-- Compares what the request assumes about the records of its callers with what stands, before
-- anything is read or written. If one differs, the script charges nothing and answers all of them:
-- the time, a line with `~`, and each record as its length, a colon and its bytes. Where the key is
-- of another type, the server's error stands for it, which is no record.
--
--     KEYS: the last ones, one for each record.
--     ARGV, behind the time: how many, and for each its FIELD, RECORD and END: the record's bytes,
--           empty for none; and if it ends, when, with a sign before it if the request assumes that
--           it has ended.
do
  local args, count = ARGV, ARGV[first0] + 0
  local next, before, differs = first0 + 1, #KEYS - count, false
  for record = 1, count do
    local ends = args[next + 2]
    if (pcall0('HGET', KEYS[before + record], args[next]) or '') ~= args[next + 1] then
      differs = true
    elseif ends ~= '' then
      ends = ends + 0
      if ends < 0 and now < -ends or ends >= 0 and now >= ends then differs = true end
    end
    next = next + 3
  end
  if differs then
    local answer = time0 .. '~\n'
    for record = 1, count do
      local key, field = KEYS[before + record], args[first0 + 3 * record - 2]
      local stands = pcall0('HGET', key, field) or ''
      -- Any other error is raised.
      if type(stands) == 'table' then
        stands = match(stands.err, 'WRONGTYPE.*') or call('HGET', key, field)
      end
      answer = answer .. #stands .. ':' .. stands
    end
    return answer
  end
  first0 = next
end
