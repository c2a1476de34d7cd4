//! Each function against the built-in one that it replaces.

use std::time::Duration;

use proptest::prelude::*;
use rusqlite::functions::FunctionFlags;
use rusqlite::types::{ToSqlOutput, Value};
use rusqlite::{Connection, ErrorCode};

use crate::sqlite::sandbox::Sandbox;

const BYTES_MAX: usize = 32 << 20;

struct Both {
    plain: Connection,
    ours: Connection,
}

impl Both {
    fn new() -> Self {
        let mut ours = Connection::open_in_memory().expect("opens");
        Sandbox::on(&mut ours, BYTES_MAX).expect("replaces");
        Self { plain: Connection::open_in_memory().expect("opens"), ours }
    }

    /// Checks that both functions return the same type, bytes and error, and the same JSON subtype.
    fn check(&self, call: &str, arguments: &[Argument]) {
        let sql = format!("SELECT typeof({call}), CAST({call} AS BLOB), json_array({call})");
        let run = |conn: &Connection| {
            let mut statement = conn.prepare_cached(&sql)?;
            let arguments = rusqlite::params_from_iter(arguments);
            statement.query_row(arguments, |row| {
                let array = row.get_ref(2)?.as_bytes().map(<[u8]>::to_vec)?;
                Ok((row.get::<_, String>(0)?, row.get::<_, Value>(1)?, array))
            })
        };
        let text = |error: rusqlite::Error| error.to_string();
        assert_eq!(
            run(&self.ours).map_err(text),
            run(&self.plain).map_err(text),
            "{call} of {arguments:?}"
        );
    }
}

#[derive(Debug, Clone)]
enum Argument {
    Value(Value),
    /// Text that may not be UTF-8.
    Text(Vec<u8>),
}

impl rusqlite::ToSql for Argument {
    fn to_sql(&self) -> rusqlite::Result<ToSqlOutput<'_>> {
        match self {
            Self::Value(value) => value.to_sql(),
            Self::Text(text) => Ok(ToSqlOutput::Borrowed(rusqlite::types::ValueRef::Text(text))),
        }
    }
}

/// A text of few different letters, so that most needles are found, and of the bytes with a special
/// meaning.
fn text(alphabet: &'static [&'static [u8]]) -> impl Strategy<Value = Vec<u8>> {
    prop::collection::vec(prop::sample::select(alphabet), 0..9).prop_map(|parts| parts.concat())
}

fn argument(alphabet: &'static [&'static [u8]]) -> impl Strategy<Value = Argument> {
    prop_oneof![
        8 => text(alphabet).prop_map(Argument::Text),
        2 => text(alphabet).prop_map(|bytes| Argument::Value(Value::Blob(bytes))),
        1 => prop_oneof![
            Just(Value::Null),
            (-120_i64..120).prop_map(Value::Integer),
            Just(Value::Integer(i64::MIN)),
            (-99.0_f64..99.0).prop_map(Value::Real),
            Just(Value::Real(1e300)),
            Just(Value::Real(f64::INFINITY)),
            Just(Value::Real(0.1 + 0.2)),
        ]
        .prop_map(Argument::Value),
    ]
}

const LETTERS: &[&[u8]] = &[
    b"a",
    b"a",
    b"b",
    b"A",
    "é".as_bytes(),
    "É".as_bytes(),
    "☃".as_bytes(),
    "😀".as_bytes(),
    b"1",
    b".",
    b"\0",
    b"\xc3",
    b"\xa9",
    b"\x80",
    b"\xff",
    b"\xed\xa0\x80",
];

const WILD: &[&[u8]] = &[
    b"a",
    b"a",
    b"b",
    b"B",
    b"%",
    b"_",
    b"*",
    b"?",
    b"[",
    b"[a-b]",
    b"[^a]",
    b"]",
    b"^",
    b"-",
    b"!",
    b"\\",
    "é".as_bytes(),
    b"\xa9",
    b"\xc3",
    b"\0",
    b"1",
];

const HEX: &[&[u8]] = &[b"0", b"9", b"aF", b"F", b"-", b" ", b"g", "é".as_bytes(), b"\0", b"\xc3"];

const JSON: &[&str] = &[
    "null",
    "1",
    "-1.50e2",
    "0x1F",
    "true",
    "\"a\"",
    "\"\\u0061\"",
    "'b'",
    "[]",
    "[1, [2], {}]",
    "{}",
    "{\"a\":1}",
    "{\"a\":null}",
    "{a:{b:1,c:null}}",
    "{\"a\":{\"b\":{\"x\":[]}},\"c\":3}",
    "{\"a\":1,\"a\":2}",
    "{\"\\u0061\":5,\"b\":\"\\n,}\\\"\"}",
    "{\"b\":{},\"a\":{\"b\":null}}",
    "{\"é\":1,\"\\u00e9\":2}",
    "{\"😀\":1}",
    "{\"\\ud83d\\ude00\":null, \"z\":[{\"q\":null}]}",
    "{",
    "",
    "nope",
    "{\"c\":null,\"d\":{\"e\":null,\"f\":{\"g\":1}}}",
    "Infinity",
    "[1,]",
    "{\"a\\/b\":1}",
    "{\"a/b\":2}",
];

fn json() -> impl Strategy<Value = Argument> {
    let scalar = || prop::sample::select(JSON).prop_map(str::to_owned);
    let label = || prop::sample::select(&["\"a\"", "\"b\"", "c", "\"\\u0061\"", "'d'"][..]);
    let nested = scalar().prop_recursive(3, 12, 3, move |inner| {
        let members = prop::collection::vec((label(), inner.clone()), 0..4);
        prop_oneof![
            members.prop_map(|members| {
                let members: Vec<_> = members.iter().map(|(l, v)| format!("{l} : {v}")).collect();
                format!("{{{}}}", members.join(" , "))
            }),
            prop::collection::vec(inner, 0..3).prop_map(|all| format!("[ {} ]", all.join(" , "))),
        ]
    });
    prop_oneof![
        9 => nested.prop_map(|text| Argument::Text(text.into_bytes())),
        1 => argument(LETTERS),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 2_000, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn each_function_returns_what_the_built_in_one_returns(
        a in argument(LETTERS), b in argument(LETTERS), c in argument(LETTERS),
        pattern in argument(WILD), wild in argument(WILD), escape in argument(WILD),
        hex in argument(HEX), ignored in argument(HEX),
        target in json(), patch in json(),
    ) {
        thread_local!(static BOTH: Both = Both::new());
        BOTH.with(|both| {
            let two = [a.clone(), b.clone()];
            both.check("instr(?1, ?2)", &two);
            both.check("trim(?1, ?2)", &two);
            both.check("ltrim(?1, ?2)", &two);
            both.check("rtrim(?1, ?2)", &two);
            both.check("replace(?1, ?2, ?3)", &[a.clone(), b, c]);
            both.check("unhex(?1, ?2)", &[hex, ignored]);
            for text in [wild, a] {
                both.check("?2 LIKE ?1", &[pattern.clone(), text.clone()]);
                both.check("?2 GLOB ?1", &[pattern.clone(), text.clone()]);
                both.check("?2 LIKE ?1 ESCAPE ?3", &[pattern.clone(), text, escape.clone()]);
            }
            both.check("json_patch(?1, ?2)", &[target.clone(), patch.clone()]);
            both.check("json(jsonb_patch(?1, ?2))", &[target.clone(), patch.clone()]);
            both.check("json_patch(jsonb(?1), jsonb(?2))", &[target.clone(), patch]);
            both.check("json_pretty(?1)", std::slice::from_ref(&target));
            both.check("json_pretty(?1, ?2)", &[target, pattern]);
        });
    }
}

#[test]
fn nothing_is_nested_deeper_than_in_sqlite() {
    let both = Both::new();
    for depth in [998, 999, 1_000, 1_001, 1_002] {
        let nested = Argument::Value(Value::Text("[".repeat(depth) + &"]".repeat(depth)));
        both.check("length(json_pretty(?1))", std::slice::from_ref(&nested));
        let object =
            Argument::Value(Value::Text("{\"a\":".repeat(depth) + "1" + &"}".repeat(depth)));
        both.check("json_patch('{\"a\":1}', ?1)", std::slice::from_ref(&object));
        both.check("json_patch(?1, ?1)", &[object]);
    }
}

#[test]
fn each_function_has_the_flags_of_the_built_in_one() {
    // Without these flags an index over an expression, a generated column or a CHECK could not be
    // used.
    let list = "SELECT name || '/' || narg, max(flags & ?1) FROM pragma_function_list
                WHERE narg >= 0 GROUP BY 1";
    let wanted = FunctionFlags::SQLITE_DETERMINISTIC | FunctionFlags::SQLITE_INNOCUOUS;
    let flags = |conn: &Connection| -> Vec<(String, i64)> {
        let mut rows = conn.prepare(list).expect("prepares");
        let rows = rows.query_map([wanted.bits()], |row| Ok((row.get(0)?, row.get(1)?)));
        rows.and_then(Iterator::collect).expect("reads")
    };
    let both = Both::new();
    assert_eq!(flags(&both.ours), flags(&both.plain));
}

/// The longest body of the default configuration, filled as an attacker would fill it.
const LONG: usize = 1 << 20;

/// The built-in function takes minutes.
const SLOW: &[&str] = &[
    "SELECT length(replace(:a, substr(:a, 1, 500000) || 'b', 'x'))",
    "SELECT instr(:a, substr(:a, 1, 500000) || 'b')",
    "SELECT length(trim(:a, replace(hex(zeroblob(100000)), '0', 'b') || 'a'))",
    "SELECT length(rtrim(:a, replace(hex(zeroblob(100000)), '0', 'é') || 'a'))",
    "SELECT unhex(replace(:a, 'a', '-'), replace(hex(zeroblob(100000)), '0', 'b') || '-')",
    "SELECT :a LIKE '%' || substr(:a, 1, 40000) || 'b'",
    "SELECT :a LIKE '%' || replace(hex(zeroblob(15000)), '0', '_') || 'b%c'",
    "SELECT :a GLOB '*' || replace(hex(zeroblob(15000)), '0', '?') || 'b'",
    "SELECT :a GLOB '*' || replace(hex(zeroblob(2000)), '0', '[a-c]') || 'x'",
    "SELECT length(json_patch('{}', :object))",
    "SELECT length(json_patch(:object, :object))",
    "SELECT length(jsonb_patch(:object, replace(:object, 'k', 'j')))",
    "SELECT length(json_pretty(:deep))",
    "SELECT length(json_pretty(:object, :a))",
    "SELECT printf('%*d', 2000000000, 1)",
    "SELECT printf('%.*c', 2000000000, 'x')",
    "SELECT printf('%.99999999f', 1e300)",
    "SELECT length(zeroblob(1000000000))",
    "SELECT length(randomblob(1000000000))",
    "SELECT length(hex(zeroblob(500000000)))",
    "WITH RECURSIVE c(x) AS (SELECT :a UNION ALL SELECT x || x FROM c) SELECT sum(length(x)) FROM c",
    "WITH RECURSIVE c(x) AS (SELECT :a UNION ALL SELECT x || 'a' FROM c) SELECT sum(length(x)) FROM c",
    "WITH RECURSIVE c(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM c) SELECT group_concat(:a) FROM c",
    "WITH RECURSIVE c(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM c) SELECT json_group_array(:a) FROM c",
    "SELECT sum(length(json)) FROM json_each(:array)",
    "WITH RECURSIVE c(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM c) SELECT sum(i) FROM c",
];

#[test]
fn no_statement_runs_for_long() {
    // With the built-in functions most of these take minutes each, or gigabytes.
    let a = "a".repeat(LONG);
    let members: Vec<_> = (0..LONG / 16).map(|n| format!("\"k{n:07}\":1")).collect();
    let object = format!("{{{}}}", members.join(","));
    let deep = "[".repeat(900) + &"1,".repeat(LONG / 2 - 2_000) + "1" + &"]".repeat(900);
    let array = format!("[{}1]", "1,".repeat(LONG / 2 - 2));
    let mut conn = Connection::open_in_memory().expect("opens");
    let sandbox = Sandbox::on(&mut conn, 32 * LONG).expect("confines");
    for sql in SLOW {
        let confined = sandbox.confine(&conn, Duration::from_millis(50)).expect("confines");
        let mut statement = conn.prepare(sql).expect(sql);
        for (name, value) in
            [(":a", &a), (":object", &object), (":deep", &deep), (":array", &array)]
        {
            if let Some(place) = statement.parameter_index(name).expect("a name") {
                statement.raw_bind_parameter(place, value).expect("binds");
            }
        }
        let ran = statement.raw_query().next().map(|_| ());
        let code = ran.as_ref().err().and_then(rusqlite::Error::sqlite_error_code);
        let ended = matches!(code, Some(ErrorCode::OperationInterrupted | ErrorCode::TooBig));
        assert!(ran.is_ok() || ended, "{sql}: {ran:?}");
        drop(confined);
    }
}
