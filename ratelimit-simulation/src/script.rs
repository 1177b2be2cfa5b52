//! Runs scripts as a server does: by the Lua 5.1 that Redis embeds, with `redis.call` and `struct`.

use std::cell::RefCell;
use std::collections::HashMap;

use mlua::{Function, Lua, LuaOptions, MultiValue, StdLib, Table, Value, Variadic};
use ratelimit_redis::Reply;

use crate::keyspace::{Keyspace, Refused};

/// Errors are tables with the field `err`, which `redis.call` raises and `redis.pcall` returns.
const LIBRARY: &str = "
redis = {
  pcall = command,
  error_reply = function(message) return { err = message } end,
  acl_check_cmd = function() return true end,
  call = function(...)
    local reply = command(...)
    if type(reply) == 'table' and reply.err then error(reply, 0) end
    return reply
  end,
}
function run(script, keys, arguments)
  KEYS, ARGV = keys, arguments
  local done, reply = pcall(script)
  if done or type(reply) == 'table' and reply.err then return reply end
  return { err = 'ERR ' .. tostring(reply) }
end
";

/// The interpreter of a thread, and what the running script works on.
struct Interpreter {
    lua: Lua,
    run: Function,
    /// By their hashes. Scripts leave nothing behind in the interpreter, so all servers share them.
    compiled: RefCell<HashMap<String, Function>>,
}

thread_local! {
    static INTERPRETER: Interpreter = Interpreter::new().expect("an interpreter");
    static RUNNING: RefCell<(Keyspace, u64)> = RefCell::default();
}

/// Runs a script on a keyspace at a time.
pub(crate) fn run(
    keyspace: &mut Keyspace,
    now_us: u64,
    (sha, text): (&str, &str),
    keys: &[Vec<u8>],
    arguments: &[Vec<u8>],
) -> Result<Reply, Refused> {
    INTERPRETER.with(|interpreter| {
        RUNNING.set((std::mem::take(keyspace), now_us));
        let reply = interpreter.run(sha, text, keys, arguments);
        *keyspace = RUNNING.take().0;
        reply.unwrap_or_else(|error| Err(format!("ERR {error}")))
    })
}

type Outcome = Result<Reply, Refused>;

impl Interpreter {
    fn new() -> mlua::Result<Self> {
        let libraries = StdLib::TABLE | StdLib::STRING | StdLib::MATH;
        let lua = Lua::new_with(libraries, LuaOptions::default())?;
        let globals = lua.globals();
        globals.set("command", lua.create_function(command)?)?;
        let structs = lua.create_table()?;
        structs.set("pack", lua.create_function(pack)?)?;
        structs.set("unpack", lua.create_function(unpack)?)?;
        globals.set("struct", structs)?;
        lua.load(LIBRARY).exec()?;
        let run = globals.get("run")?;
        Ok(Self { lua, run, compiled: RefCell::default() })
    }

    fn run(
        &self,
        sha: &str,
        text: &str,
        keys: &[Vec<u8>],
        arguments: &[Vec<u8>],
    ) -> mlua::Result<Outcome> {
        let known = self.compiled.borrow().get(sha).cloned();
        let compile = || {
            let script = self.lua.load(text).into_function()?;
            self.compiled.borrow_mut().insert(sha.to_owned(), script.clone());
            mlua::Result::Ok(script)
        };
        let script = known.map_or_else(compile, Ok)?;
        let list = |words: &[Vec<u8>]| {
            let words = words.iter().map(|word| self.lua.create_string(word));
            self.lua.create_sequence_from(words.collect::<mlua::Result<Vec<_>>>()?)
        };
        let reply: Value = self.run.call((script, list(keys)?, list(arguments)?))?;
        of_lua(&reply)
    }
}

/// The reply of a value that a script returns: numbers without their fractions, and tables up to
/// the first nil.
fn of_lua(value: &Value) -> mlua::Result<Outcome> {
    Ok(Ok(match value {
        Value::Boolean(true) => Reply::Integer(1),
        Value::Integer(number) => Reply::Integer(*number),
        #[allow(clippy::cast_possible_truncation, reason = "as a server converts it")]
        Value::Number(number) => Reply::Integer(*number as i64),
        Value::String(text) => Reply::Text(text.as_bytes().to_vec()),
        Value::Table(table) => {
            if let Some(error) = table.get::<Option<mlua::LuaString>>("err")? {
                return Ok(Err(error.to_string_lossy()));
            }
            let mut items = Vec::new();
            for item in table.sequence_values::<Value>() {
                match of_lua(&item?)? {
                    Ok(item) => items.push(item),
                    refused => return Ok(refused),
                }
            }
            Reply::Array(items)
        }
        _ => Reply::Nil,
    }))
}

/// `redis.pcall`.
#[allow(clippy::needless_pass_by_value, reason = "the signature that the interpreter calls")]
fn command(lua: &Lua, words: Variadic<Value>) -> mlua::Result<Value> {
    let word = |value: &Value| match value {
        Value::String(text) => Ok(text.as_bytes().to_vec()),
        Value::Integer(number) => Ok(number.to_string().into_bytes()),
        // A server prints 17 digits: of a whole number below 2^53 all.
        Value::Number(number) => Ok(format!("{number:.0}").into_bytes()),
        _ => {
            Err(mlua::Error::runtime("Lua redis lib command arguments must be strings or integers"))
        }
    };
    let words = words.iter().map(word).collect::<mlua::Result<Vec<_>>>()?;
    let reply = RUNNING.with_borrow_mut(|(keyspace, now_us)| keyspace.execute(*now_us, &words));
    let table = |field, text: &str| {
        let table = lua.create_table()?;
        table.set(field, text)?;
        Ok(Value::Table(table))
    };
    match reply {
        Err(refused) => table("err", &refused),
        Ok(_) if matches!(&*words[0], b"SET" | b"LSET" | b"LTRIM") => table("ok", "OK"),
        Ok(reply) => to_lua(lua, &reply),
    }
}

fn to_lua(lua: &Lua, reply: &Reply) -> mlua::Result<Value> {
    Ok(match reply {
        #[allow(clippy::cast_precision_loss, reason = "as a server converts it")]
        Reply::Integer(number) => Value::Number(*number as f64),
        Reply::Text(text) => Value::String(lua.create_string(text)?),
        Reply::Array(items) => {
            let items = items.iter().map(|item| to_lua(lua, item));
            let table: Table =
                lua.create_sequence_from(items.collect::<mlua::Result<Vec<_>>>()?)?;
            Value::Table(table)
        }
        _ => Value::Boolean(false),
    })
}

/// A part of a format for `struct`, in the order of bytes that `<` asks for.
enum Part {
    Text(usize),
    Number(usize),
}

/// The parts of a format such as `<c5I7I7`.
fn parts(format: &str) -> mlua::Result<Vec<Part>> {
    let unknown = || mlua::Error::runtime(format!("the model's struct does not know {format}"));
    let part = |text: &str| {
        let (kind, length) = text.split_at(1);
        let length = length.parse().map_err(|_| unknown())?;
        match kind {
            "c" => Ok(Part::Text(length)),
            "I" => Ok(Part::Number(length)),
            _ => Err(unknown()),
        }
    };
    let rest = format.strip_prefix('<').ok_or_else(unknown)?;
    let begins = rest.char_indices().filter(|(_, letter)| letter.is_ascii_alphabetic());
    let begins: Vec<_> = begins.map(|(place, _)| place).chain([rest.len()]).collect();
    begins.windows(2).map(|ends| part(&rest[ends[0]..ends[1]])).collect()
}

fn pack(lua: &Lua, (format, values): (String, Variadic<Value>)) -> mlua::Result<mlua::LuaString> {
    let mut packed = Vec::new();
    for (part, value) in parts(&format)?.iter().zip(values.iter()) {
        match (part, value) {
            (Part::Text(length), Value::String(text)) => packed.extend(&text.as_bytes()[..*length]),
            (Part::Number(length), Value::Integer(number)) => {
                packed.extend(&number.to_le_bytes()[..*length]);
            }
            #[allow(clippy::cast_possible_truncation, reason = "as the library converts it")]
            (Part::Number(length), Value::Number(number)) => {
                packed.extend(&(*number as i64).to_le_bytes()[..*length]);
            }
            _ => return Err(mlua::Error::runtime("the value does not fit the format")),
        }
    }
    lua.create_string(packed)
}

fn unpack(lua: &Lua, (format, packed): (String, mlua::LuaString)) -> mlua::Result<MultiValue> {
    let packed = packed.as_bytes();
    let (mut values, mut rest) = (MultiValue::new(), &packed[..]);
    for part in parts(&format)? {
        let (Part::Text(length) | Part::Number(length)) = part;
        let (bytes, after) = rest
            .split_at_checked(length)
            .ok_or_else(|| mlua::Error::runtime("data string too short"))?;
        rest = after;
        values.push_back(match part {
            Part::Text(_) => Value::String(lua.create_string(bytes)?),
            Part::Number(_) => {
                let mut number = [0; 8];
                number[..length].copy_from_slice(bytes);
                #[allow(clippy::cast_precision_loss, reason = "as the library converts it")]
                Value::Number(u64::from_le_bytes(number) as f64)
            }
        });
    }
    #[allow(clippy::cast_precision_loss, reason = "a place in a short text")]
    values.push_back(Value::Number((packed.len() - rest.len() + 1) as f64));
    Ok(values)
}
