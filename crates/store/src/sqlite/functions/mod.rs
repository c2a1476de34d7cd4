//! SQL functions that replace built-in ones on the connection that runs handlers.
//!
//! SQLite cannot interrupt a function while it runs, and the writer, which commits every ack, waits
//! for it. The functions here return what the built-in ones return, for every input. Their cost is
//! linear in the input's length, or they check the deadline while they work. Equal results matter:
//! a user's index or generated column may hold what the built-in function returned. Only
//! `jsonb_patch` differs: its binary form holds numbers and strings of JSON5 in their JSON
//! notation.
//!
//! Built-in functions that are absent here take linear time and build at most
//! [`super::sandbox::Sandbox`]'s bound.

mod json;
mod pattern;
mod text;

use std::sync::{Arc, Mutex, PoisonError};

use rusqlite::functions::{Context, FunctionFlags, SqlFnOutput};
use rusqlite::types::{ToSql, Value, ValueRef};
use rusqlite::{Connection, ffi};

use super::sandbox::Deadline;

/// Replaces the functions on `conn`. Their results are at most `bytes_max` long.
pub(super) fn replace_on(
    conn: &Connection,
    deadline: &Deadline,
    bytes_max: usize,
) -> rusqlite::Result<()> {
    let tools = Tools {
        deadline: deadline.clone(),
        bytes_max,
        plain: Arc::new(Mutex::new(Connection::open_in_memory()?)),
    };
    let add = Adder { conn, tools };
    add.function("instr", 2, text::instr)?;
    add.function("replace", 3, text::replace)?;
    add.function("trim", 2, text::trim)?;
    add.function("ltrim", 2, text::ltrim)?;
    add.function("rtrim", 2, text::rtrim)?;
    add.function("unhex", 2, text::unhex)?;
    add.function("like", 2, pattern::like)?;
    add.function("like", 3, pattern::like)?;
    add.function("glob", 2, pattern::glob)?;
    add.function("json_patch", 2, json::patch)?;
    add.function("jsonb_patch", 2, json::patch_binary)?;
    add.function("json_pretty", 1, json::pretty)?;
    add.function("json_pretty", 2, json::pretty)
}

struct Adder<'a> {
    conn: &'a Connection,
    tools: Tools,
}

impl Adder<'_> {
    fn function<T: SqlFnOutput + 'static>(
        &self,
        name: &str,
        arguments: i32,
        function: fn(&Context<'_>, &Tools) -> rusqlite::Result<T>,
    ) -> rusqlite::Result<()> {
        // Like the built-in functions, these can be used in indexes, generated columns and CHECK
        // constraints.
        let flags = FunctionFlags::SQLITE_UTF8
            | FunctionFlags::SQLITE_DETERMINISTIC
            | FunctionFlags::SQLITE_INNOCUOUS
            | FunctionFlags::SQLITE_RESULT_SUBTYPE;
        let tools = self.tools.clone();
        self.conn.create_scalar_function(name, arguments, flags, move |context: &Context<'_>| {
            tools.deadline.check()?;
            function(context, &tools)
        })
    }
}

/// Shared state of the functions.
#[derive(Clone)]
struct Tools {
    deadline: Deadline,
    bytes_max: usize,
    /// A database with the built-in functions, for the conversions that only SQLite knows exactly.
    plain: Arc<Mutex<Connection>>,
}

impl Tools {
    /// An argument as SQLite turns it into text; `None` for NULL.
    fn text<'a>(&self, value: ValueRef<'a>) -> rusqlite::Result<Option<Bytes<'a>>> {
        Ok(match value {
            ValueRef::Null => None,
            ValueRef::Text(bytes) | ValueRef::Blob(bytes) => Some(Bytes::Given(bytes)),
            ValueRef::Integer(number) => Some(Bytes::Made(number.to_string().into_bytes())),
            ValueRef::Real(_) => match self.plainly("SELECT CAST(?1 AS TEXT)", value)? {
                Value::Text(text) => Some(Bytes::Made(text.into_bytes())),
                _ => None,
            },
        })
    }

    /// Runs one built-in function over one value.
    fn plainly(&self, sql: &str, value: ValueRef<'_>) -> rusqlite::Result<Value> {
        let plain = self.plain.lock().unwrap_or_else(PoisonError::into_inner);
        let mut statement = plain.prepare_cached(sql)?;
        statement.query_row([rusqlite::types::ToSqlOutput::Borrowed(value)], |row| row.get(0))
    }

    fn work(&self) -> WorkCount<'_> {
        WorkCount { deadline: &self.deadline, until_look: STEPS_PER_LOOK }
    }
}

/// The bytes of an argument.
enum Bytes<'a> {
    Given(&'a [u8]),
    Made(Vec<u8>),
}

impl std::ops::Deref for Bytes<'_> {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        match self {
            Self::Given(bytes) => bytes,
            Self::Made(bytes) => bytes,
        }
    }
}

/// Text as a function returns it. SQLite keeps text that is not UTF-8 as it is.
struct Text(Vec<u8>);

impl ToSql for Text {
    fn to_sql(&self) -> rusqlite::Result<rusqlite::types::ToSqlOutput<'_>> {
        Ok(rusqlite::types::ToSqlOutput::Borrowed(ValueRef::Text(&self.0)))
    }
}

/// Steps of a function between two checks of the clock: some microseconds.
const STEPS_PER_LOOK: usize = 4_096;

/// Counts the steps of a loop, and ends it at the deadline.
struct WorkCount<'a> {
    deadline: &'a Deadline,
    until_look: usize,
}

impl WorkCount<'_> {
    fn step(&mut self, cost: usize) -> rusqlite::Result<()> {
        match self.until_look.checked_sub(cost) {
            Some(left) => self.until_look = left,
            None => {
                self.until_look = STEPS_PER_LOOK;
                self.deadline.check()?;
            }
        }
        Ok(())
    }
}

fn too_big() -> rusqlite::Error {
    rusqlite::Error::SqliteFailure(ffi::Error::new(ffi::SQLITE_TOOBIG), None)
}

fn error(message: &str) -> rusqlite::Error {
    rusqlite::Error::SqliteFailure(ffi::Error::new(ffi::SQLITE_ERROR), Some(message.to_owned()))
}

/// Reads one character as SQLite does, malformed ones included, and returns the rest.
fn read_char(bytes: &[u8]) -> Option<(u32, &[u8])> {
    let (&first, mut rest) = bytes.split_first()?;
    if first < 0xc0 {
        return Some((first.into(), rest));
    }
    let mut char = u32::from(match first {
        0xc0..0xe0 => first & 0x1f,
        0xe0..0xf0 => first & 0x0f,
        0xf0..0xf8 => first & 0x07,
        0xf8..0xfc => first & 0x03,
        0xfc..0xfe => first & 0x01,
        0xfe.. => 0,
        0..0xc0 => first,
    });
    while let Some((&next, after)) = rest.split_first()
        && is_continuation(next)
    {
        char = (char << 6).wrapping_add(u32::from(next & 0x3f));
        rest = after;
    }
    if char < 0x80 || char & 0xffff_f800 == 0xd800 {
        char = 0xfffd;
    }
    Some((char, rest))
}

fn is_continuation(byte: u8) -> bool {
    byte & 0xc0 == 0x80
}

/// The part before the first NUL, where C ends a text.
fn until_nul(bytes: &[u8]) -> &[u8] {
    memchr::memchr(0, bytes).map_or(bytes, |at| &bytes[..at])
}

#[cfg(test)]
mod tests;
