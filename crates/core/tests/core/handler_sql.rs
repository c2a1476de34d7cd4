//! The parser of the user's SQL for SQLite: which text is a parameter, which only looks like one,
//! and which is refused with which message.

use hapax_core::handler::{Dialect, SqlParameter, SqlProgram};
use proptest::prelude::*;

/// `expected` are the statements as `text {parameters}`.
fn check(text: &str, expected: &[&str]) {
    let program =
        SqlProgram::parse(text, Dialect::Sqlite).unwrap_or_else(|error| panic!("{text}\n{error}"));
    let found: Vec<_> = program
        .statements
        .iter()
        .map(|statement| {
            let names = statement.parameters.iter().map(|parameter| parameter.name());
            format!("{} {{{}}}", statement.text, names.collect::<Vec<_>>().join(" "))
        })
        .collect();
    assert_eq!(found, expected, "{text}");
}

/// `¶` marks the position of the error, and is removed.
fn refused(marked: &str, parts: &[&str]) {
    let (before, after) = marked.split_once('¶').unwrap();
    let error = SqlProgram::parse(&format!("{before}{after}"), Dialect::Sqlite).expect_err(marked);
    let line = before.matches('\n').count() + 1;
    let column = before.rsplit('\n').next().unwrap_or(before).chars().count() + 1;
    assert_eq!((error.line, error.column), (line, column), "{marked}: {error:?}");
    let said = format!("{} | {}", error.problem, error.hint);
    assert!(parts.iter().all(|part| said.contains(part)), "{marked}: {said}");
}

#[test]
fn parameters_are_numbered_in_the_order_they_come_and_each_has_one_number() {
    check(
        "INSERT INTO fees VALUES (:event_id, :id, :event_id)",
        &["INSERT INTO fees VALUES (?1, ?2, ?1) {event_id id}"],
    );
    check("SELECT 1", &["SELECT 1 {}"]);
    let all: Vec<_> = SqlParameter::ALL.iter().map(|known| format!(":{}", known.name())).collect();
    let program = SqlProgram::parse(&format!("SELECT {}", all.join(",")), Dialect::Sqlite).unwrap();
    assert_eq!(program.statements[0].parameters, SqlParameter::ALL);
    assert_eq!(program.statements[0].text, "SELECT ?1,?2,?3,?4,?5,?6,?7,?8,?9,?10,?11,?12");
    assert!(program.uses(SqlParameter::Current));
    check(
        "select json_extract(:body,'$.a')+:attempt",
        &["select json_extract(?1,'$.a')+?2 {body attempt}"],
    );
}

#[test]
fn statements_are_split_at_semicolons_and_nowhere_else() {
    check(
        "INSERT INTO a VALUES (';');\n\nUPDATE b SET x = :id; -- done; really\n/* ; */",
        &["INSERT INTO a VALUES (';') {}", "UPDATE b SET x = ?1 {id}"],
    );
    check(";; SELECT 1 ;; ;", &["SELECT 1 {}"]);
    check("SELECT :id; SELECT :body, :id", &["SELECT ?1 {id}", "SELECT ?1, ?2 {body id}"]);
    check(
        "SELECT CASE WHEN 1 THEN 2 END; VALUES (1)",
        &["SELECT CASE WHEN 1 THEN 2 END {}", "VALUES (1) {}"],
    );
    for verb in ["SELECT", "with", "Insert", "UPDATE", "delete", "REPLACE", "values"] {
        check(&format!("/* c */ {verb} x"), &[&format!("{verb} x {{}}")]);
    }
    let program =
        SqlProgram::parse("\u{feff}-- a\n\nSELECT 1;\nSELECT\n2;\r\n  SELECT 3", Dialect::Sqlite)
            .unwrap();
    let lines: Vec<_> = program.statements.iter().map(|statement| statement.line).collect();
    assert_eq!(lines, [3, 4, 6]);
}

#[test]
fn text_that_only_looks_like_a_parameter_stays_unchanged() {
    for inert in [
        "':id'",
        "'it''s :id'",
        "''':id'''",
        "\":id\"",
        "\"a\"\":id\"",
        "`:id`",
        "`a``:id`",
        "[:id]",
        "-- :id\n",
        "--:nonsense ? $1 @x '\n",
        "/* :id */",
        "/* it's :id */",
        "/*/ :id */",
        "/* a /* :id */",
        "$$ :id $$",
        "$$ :id ' $$",
        "$tag$ :id $$ $tag :id $tag$",
        "E'\\':id'",
        "e'a''\\\\\\':id'",
        "x::id",
        "x::text",
        "'1'::id::body",
        "a := 1",
        "x'3a6964'",
        "a$id",
        "a$$id",
        "- 1",
        "a / b * c",
        "a -> 'b' ->> ':c'",
        "a @> b",
        "'größe :id'",
    ] {
        check(&format!("SELECT {inert} , :id"), &[&format!("SELECT {inert} , ?1 {{id}}")]);
    }
    // A backslash has no meaning in an ordinary string, so the parameter is outside of it.
    check("SELECT 'a\\', :id", &["SELECT 'a\\', ?1 {id}"]);
    check("SELECT nameE'a\\', :id", &["SELECT nameE'a\\', ?1 {id}"]);
    check("SELECT :id::text", &["SELECT ?1::text {id}"]);
    check("SELECT x::text,:id", &["SELECT x::text,?1 {id}"]);
    check("SELECT(:id)||:id", &["SELECT(?1)||?1 {id}"]);
    check("SELECT :id-- :body", &["SELECT ?1 {id}"]);
    check("SELECT 1 -:id/* :body */", &["SELECT 1 -?1 {id}"]);
}

#[test]
fn unknown_parameters_name_the_known_ones_and_the_one_that_was_meant() {
    refused("SELECT ¶:evnt_id", &["unknown parameter :evnt_id", "did you mean :event_id?", ":id"]);
    refused("SELECT 1,\n  ¶:Body", &["unknown parameter :Body", "did you mean :body?"]);
    refused("SELECT ¶:amount", &["unknown parameter :amount", "known: :tenant :source :event_id"]);
    refused("SELECT ¶:1", &["unknown parameter :1"]);
    refused("SELECT ¶:idé", &["unknown parameter :idé"]);
    refused("SELECT 'é', ¶:id_", &["did you mean :id?"]);
    refused("SELECT ¶:id$x", &["unknown parameter :id$x"]);
}

#[test]
fn parameters_in_another_spelling_are_refused_rather_than_bound_to_nothing() {
    refused("SELECT ¶?", &["? is not a parameter", "parameters are named: :tenant"]);
    refused("SELECT :id, ¶?1", &["not a parameter"]);
    refused("SELECT ¶@id", &["@id is not a parameter"]);
    refused("SELECT ¶$id", &["$id is not a parameter"]);
    refused("SELECT ¶$1", &["$1 is not a parameter"]);
}

#[test]
fn only_statements_that_read_or_write_rows_are_taken() {
    for word in ["BEGIN", "commit", "ROLLBACK", "SAVEPOINT x", "RELEASE x", "END", "START x"] {
        let first = word.split(' ').next().unwrap().to_uppercase();
        let says = format!("cannot begin with {first}");
        refused(&format!("SELECT 1;\n¶{word}"), &[&says, "Hapax begins and commits"]);
    }
    for word in ["CREATE TABLE x (y)", "drop table x", "ALTER TABLE x"] {
        refused(&format!("¶{word}"), &["cannot begin with", "migration of your own"]);
    }
    for word in ["PRAGMA x", "ATTACH 'x' AS y", "DETACH y", "VACUUM"] {
        refused(&format!(" ¶{word}; SELECT 1"), &["cannot begin with", "Hapax's"]);
    }
    for word in ["EXPLAIN SELECT 1", "selects", "SELECT_", "'SELECT'", "(SELECT 1)", "1", ":id"] {
        refused(&format!("/* x */ ¶{word}"), &["cannot begin with", "begin with SELECT, WITH"]);
    }
    refused("¶\u{a0}SELECT 1", &["cannot begin with"]);
}

#[test]
fn a_program_without_a_statement_or_without_an_end_is_refused() {
    for empty in ["¶", "¶ \n", "¶;;", "¶-- SELECT 1", "¶/* SELECT 1 */;"] {
        refused(empty, &["there is no statement"]);
    }
    refused("SELECT ¶'abc", &["a string is not closed"]);
    refused("SELECT ¶'abc''", &["a string is not closed"]);
    refused("SELECT ¶E'abc\\'", &["a string is not closed"]);
    refused("SELECT ¶\"abc", &["a quoted name is not closed"]);
    refused("SELECT ¶[abc", &["not closed", "no ] ends it"]);
    refused("SELECT 1 ¶/* abc", &["a comment is not closed"]);
    refused("SELECT 1 ¶/*/", &["a comment is not closed"]);
    refused("SELECT ¶$a$ $$ $b$", &["a dollar quote is not closed", "$a$"]);
    // The database would stop reading at the NUL, and the parser would not.
    refused("SELECT 1 ¶\0; DELETE FROM x", &["NUL"]);
}

/// A piece of SQL, and the parameter that it stands for; `None` if the parser leaves the piece
/// unchanged.
fn piece() -> impl Strategy<Value = (String, Option<SqlParameter>)> {
    let known = prop::sample::select(SqlParameter::ALL.to_vec());
    let noise = "[a-z:;'\"`\\[\\]$?@*/ \n\\\\-]{0,12}(:id|;|:body|\\?)?";
    let without = |mut noise: String, quote: &str| {
        // Removing one occurrence may create another one from the text around it.
        while noise.contains(quote) {
            noise = noise.replace(quote, "");
        }
        noise
    };
    prop_oneof![
        4 => known.prop_map(|known| (format!(":{}", known.name()), Some(known))),
        1 => noise.prop_map(|noise| (format!("'{}'", noise.replace('\'', "''")), None)),
        1 => noise.prop_map(|noise| (format!("\"{}\"", noise.replace('"', "\"\"")), None)),
        1 => noise.prop_map(|noise| (format!("`{}`", noise.replace('`', "``")), None)),
        1 => noise.prop_map(move |noise| (format!("[{}]", without(noise, "]")), None)),
        1 => noise.prop_map(move |noise| (format!("--{}\n", without(noise, "\n")), None)),
        1 => noise.prop_map(move |noise| (format!("/*{} */", without(noise, "*/")), None)),
        1 => noise.prop_map(move |noise| (format!("$q${} $q$", without(noise, "$q$")), None)),
        1 => noise.prop_map(|noise| {
            let escaped = noise.replace('\\', "\\\\").replace('\'', "\\'");
            (format!("E'{escaped}'"), None)
        }),
        1 => "(x|1\\.5|::text|::id|,|\\(|\\)|=|<>|\\|\\||->>|@>|a\\$b)".prop_map(|text| (text, None)),
    ]
}

proptest! {
    #[test]
    fn parameters_are_found_among_any_strings_names_and_comments(
        pieces in prop::collection::vec(piece(), 0..20),
    ) {
        let mut text = "SELECT".to_owned();
        let mut expected = text.clone();
        let mut parameters = Vec::new();
        for (piece, parameter) in &pieces {
            text.push(' ');
            expected.push(' ');
            text.push_str(piece);
            match parameter {
                None => expected.push_str(piece),
                Some(parameter) => {
                    if !parameters.contains(parameter) {
                        parameters.push(*parameter);
                    }
                    let place = parameters.iter().position(|known| known == parameter).unwrap();
                    expected.push_str(&format!("?{}", place + 1));
                }
            }
        }
        // The suffix keeps a comment at the end from being removed.
        text.push_str(" x");
        expected.push_str(" x");
        let program = SqlProgram::parse(&text, Dialect::Sqlite).unwrap();
        prop_assert_eq!(program.statements.len(), 1);
        prop_assert_eq!(&program.statements[0].text, &expected);
        prop_assert_eq!(&program.statements[0].parameters, &parameters);
    }

    #[test]
    fn any_text_is_judged_without_a_panic_and_errors_point_into_it(
        text in "(SELECT |;|:id|:x|'|\"|`|\\[|\\]|--|/\\*|\\*/|\\$|\\$a\\$|E'|\\\\|\n|é|\\?|@|::| |\\PC){0,30}",
    ) {
        match SqlProgram::parse(&text, Dialect::Sqlite) {
            Ok(program) => prop_assert!(!program.statements.is_empty()),
            Err(error) => {
                let line = text.split('\n').nth(error.line - 1);
                prop_assert!(line.is_some_and(|line| error.column <= line.chars().count() + 1));
            }
        }
    }
}
