//! The parser of the user's SQL for PostgreSQL: which text is a parameter, which only looks like one, which
//! is refused with which message, and how the position of an error maps back to the user's text.

use hapax_core::handler::{Dialect, PostgresType, SqlError, SqlParameter, SqlPlace, SqlProgram};
use proptest::prelude::*;

fn parse(text: &str) -> Result<SqlProgram, SqlError> {
    SqlProgram::parse(text, Dialect::Postgres)
}

/// `expected` are the statements as `text {parameters}`.
fn check(text: &str, expected: &[&str]) {
    let program = parse(text).unwrap_or_else(|error| panic!("{text}\n{error}"));
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

/// The position after `before`.
fn place_after(before: &str) -> SqlPlace {
    SqlPlace {
        line: before.matches('\n').count() + 1,
        column: before.rsplit('\n').next().unwrap_or(before).chars().count() + 1,
    }
}

/// `¶` marks the position of the error, and is removed.
fn refused(marked: &str, parts: &[&str]) {
    let (before, after) = marked.split_once('¶').unwrap();
    let error = parse(&format!("{before}{after}")).expect_err(marked);
    let SqlPlace { line, column } = place_after(before);
    assert_eq!((error.line, error.column), (line, column), "{marked}: {error:?}");
    let said = format!("{} | {}", error.problem, error.hint);
    assert!(parts.iter().all(|part| said.contains(part)), "{marked}: {said}");
}

#[test]
fn parameters_become_numbers_and_each_name_has_one_in_each_statement() {
    // Repeated names, adjacent names and several statements. The numbers of each statement begin at 1; a
    // wrong number would bind the wrong value.
    check(
        "INSERT INTO fees VALUES (:event_id, :id, :event_id); SELECT :body, :id",
        &["INSERT INTO fees VALUES ($1, $2, $1) {event_id id}", "SELECT $1, $2 {body id}"],
    );
    let all: Vec<_> = SqlParameter::ALL.iter().map(|known| format!(":{}", known.name())).collect();
    let program = parse(&format!("SELECT {}", all.join(","))).unwrap();
    assert_eq!(program.statements[0].parameters, SqlParameter::ALL);
    assert_eq!(program.statements[0].text, "SELECT $1,$2,$3,$4,$5,$6,$7,$8,$9,$10,$11,$12");
    check("SELECT :id::uuid, :body::jsonb->>'a'", &["SELECT $1::uuid, $2::jsonb->>'a' {id body}"]);
    check("SELECT f(a := :id, b => :body)", &["SELECT f(a := $1, b => $2) {id body}"]);
    check("SELECT f(a:=:id,b=>:body)", &["SELECT f(a:=$1,b=>$2) {id body}"]);
    check("CALL charge(:id, :attempt)", &["CALL charge($1, $2) {id attempt}"]);
    check("(SELECT :id) UNION ((SELECT :id))", &["(SELECT $1) UNION ((SELECT $1)) {id}"]);
}

#[test]
fn a_parameter_right_after_a_word_does_not_become_part_of_it() {
    // A name may contain a dollar: THEN$1 would be a column that does not exist.
    check(
        "SELECT CASE WHEN:attempt=1THEN:id ELSE'x'END",
        &["SELECT CASE WHEN $1=1THEN $2 ELSE'x'END {attempt id}"],
    );
    check("SELECT é:id", &["SELECT é $1 {id}"]);
}

#[test]
fn each_parameter_has_its_postgres_type() {
    // With a wrong type the first job would fail, or the value would be cast silently.
    let typed: Vec<_> = SqlParameter::ALL.map(|it| (it.name(), it.postgres_type().name())).into();
    let others: Vec<_> = typed.iter().filter(|(_, kind)| *kind != "text").copied().collect();
    let times = PostgresType::Timestamptz.name();
    assert_eq!(others, [("received_at", times), ("occurred_at", times), ("attempt", "int4")]);
}

#[test]
fn text_that_only_looks_like_a_parameter_stays_unchanged() {
    // Every kind of string, name, comment or operator that contains a colon or a dollar.
    for inert in [
        "':id'",
        "'it''s :id'",
        "''':id'''",
        "\":id\"",
        "\"a\"\":id\"",
        "-- :id\n",
        "-- :id\r",
        "--:nonsense ? $1 @x '\n",
        "/* :id */",
        "/* it's :id */",
        "/*/ :id */",
        "/* a /* :id */ ' :body */",
        "/* /* /**/ :id */*/",
        "/***/",
        "1 */* :id */ 2",
        "$$ :id $$",
        "$$ :id ' $$",
        "$tag$ :id $$ $tag :id $tag$",
        "$größe_1$ :id $größe_1$",
        "$a$ $A$ :id $a$",
        "E'\\':id'",
        "e'a''\\\\\\':id'",
        "E'a' \n 'b\\':id'",
        "E'a' -- c'\n\n -- d\n 'b\\' :id' \r 'c\\':id'",
        "U&'\\0041 :id'",
        "U&'d!0061 :id' UESCAPE '!'",
        "B'01'",
        "X'3a'",
        "N':id'",
        "x::id",
        "x :: id",
        "'1'::id::body",
        "a := 1",
        "a$id",
        "a$$id",
        "a$1",
        "a / b * c",
        "a -> 'b' ->> ':c'",
        "a @> b",
        "a <@ b",
        "a ? 'b'",
        "a ?| b ?& c",
        "a ?- b",
        "@x",
        "@ -5",
        "a  b",
        "a #>> '{b}'",
        "|/ 25",
        "`",
        "1_000 + 1.5e-3 + 0x1F",
        "1$$ :id $$",
        "\u{b}",
    ] {
        check(&format!("SELECT {inert} , :id"), &[&format!("SELECT {inert} , $1 {{id}}")]);
    }
    // A backslash has no meaning in an ordinary string, even if an E stands before it as a separate
    // word.
    check("SELECT 'a\\', :id", &["SELECT 'a\\', $1 {id}"]);
    check("SELECT nameE'a\\', :id", &["SELECT nameE'a\\', $1 {id}"]);
    check("SELECT U&'a\\', :id", &["SELECT U&'a\\', $1 {id}"]);
    check("SELECT E'a' 'b\\', :id", &["SELECT E'a' 'b\\', $1 {id}"]);
    check("SELECT E'a' /*\n*/ 'b\\', :id", &["SELECT E'a' /*\n*/ 'b\\', $1 {id}"]);
    check("SELECT :id-- :body", &["SELECT $1 {id}"]);
    check("SELECT 1 -:id/* :body /* */ */", &["SELECT 1 -$1 {id}"]);
    check("SELECT @:id", &["SELECT @$1 {id}"]);
    check("SELECT :::id", &["SELECT ::$1 {id}"]);
}

#[test]
fn a_colon_in_a_subscript_parts_a_slice_where_no_parameter_could_stand() {
    // In brackets a colon is also PostgreSQL's slice operator, and columns may have the names of parameters.
    for slice in [
        "a[1:2]",
        "a[1:n]",
        "a[:n]",
        "a[:2]",
        "a[ : n ]",
        "a[n:]",
        "a[:]",
        "a[1:tenant]",
        "a[lo:id]",
        "a[lo :id]",
        "a[lo /* from */ :id]",
        "a[f(1):id]",
        "a[b[1]:id]",
        "a[\"lo\":id]",
        "a['1'::int:id]",
        "(f(x))[1:id]",
        "ARRAY[1, 2][1:id]",
        "a[1:2][1:id]",
        "a[1:-1]",
    ] {
        check(&format!("SELECT {slice} , :id"), &[&format!("SELECT {slice} , $1 {{id}}")]);
    }
    check("SELECT a[:attempt]", &["SELECT a[$1] {attempt}"]);
    check("SELECT a[:attempt:n]", &["SELECT a[$1:n] {attempt}"]);
    check("SELECT a[1: :attempt]", &["SELECT a[1: $1] {attempt}"]);
    check("SELECT a[1+:attempt]", &["SELECT a[1+$1] {attempt}"]);
    check("SELECT a[(:attempt):n]", &["SELECT a[($1):n] {attempt}"]);
    check("SELECT a[f(x, :id)]", &["SELECT a[f(x, $1)] {id}"]);
    check("SELECT ARRAY[:id, :body]", &["SELECT ARRAY[$1, $2] {id body}"]);
    check("SELECT array [[:id], [:body]]", &["SELECT array [[$1], [$2]] {id body}"]);
    check("SELECT ARRAY[a[1:id], :id]", &["SELECT ARRAY[a[1:id], $1] {id}"]);
    check(
        "SELECT a[CASE WHEN :attempt = 1 THEN :attempt ELSE :attempt END]",
        &["SELECT a[CASE WHEN $1 = 1 THEN $1 ELSE $1 END] {attempt}"],
    );
    // The database reports brackets that are not closed. The parser treats them as closed at the end
    // of the statement.
    check("SELECT a[1; SELECT 1 :id", &["SELECT a[1 {}", "SELECT 1 $1 {id}"]);
    refused("SELECT ARRAY[¶:idd]", &["unknown parameter :idd"]);
    refused("SELECT a[1 + ¶:n]", &["unknown parameter :n"]);
}

#[test]
fn unknown_parameters_and_other_spellings_are_refused() {
    // A number in the user's text would clash with the parser's numbers.
    refused("SELECT ¶:evnt_id", &["unknown parameter :evnt_id", "did you mean :event_id?", ":id"]);
    refused("SELECT 1,\n  ¶:Body", &["unknown parameter :Body", "did you mean :body?"]);
    refused("SELECT ¶:amount", &["unknown parameter :amount", "known: :tenant :source :event_id"]);
    refused("SELECT ¶:1", &["unknown parameter :1"]);
    refused("SELECT ¶:id$x", &["unknown parameter :id$x"]);
    refused("SELECT ¶$1", &["$1 is not a parameter", "parameters are named: :tenant"]);
    refused("SELECT ¶$id", &["$id is not a parameter"]);
    refused("SELECT 1¶$1", &["$1 is not a parameter"]);
    refused("SELECT ¶$1$ :id $1$", &["is not a parameter"]);
}

#[test]
fn statements_are_split_at_semicolons_and_nowhere_else() {
    // Semicolons in every token that can contain one.
    check(
        "INSERT INTO a VALUES (';');\n\nUPDATE b SET x = :id; -- done; really\n/* ; /* ; */ ; */",
        &["INSERT INTO a VALUES (';') {}", "UPDATE b SET x = $1 {id}"],
    );
    check(";; SELECT 1 ;; ;", &["SELECT 1 {}"]);
    check(
        "DO $$ BEGIN PERFORM 1; END $$; SELECT E'\\';' ; VALUES (:id)",
        &["DO $$ BEGIN PERFORM 1; END $$ {}", "SELECT E'\\';' {}", "VALUES ($1) {id}"],
    );
    for verb in ["SELECT", "with", "Insert", "UPDATE", "delete", "MERGE", "values", "Call", "DO"] {
        check(&format!("/* c /* d */ */ {verb} x"), &[&format!("{verb} x {{}}")]);
    }
    let program = parse("\u{feff}-- a\n\nSELECT 1;\nSELECT\n2;\r\n  (SELECT 3)").unwrap();
    let lines: Vec<_> = program.statements.iter().map(|statement| statement.line).collect();
    assert_eq!(lines, [3, 4, 6]);
}

#[test]
fn only_statements_that_read_or_write_rows_are_taken() {
    // Statements that would end the transaction, change the connection or fail only at run time.
    for word in ["BEGIN", "commit", "ROLLBACK", "SAVEPOINT x", "RELEASE x", "END", "START x"] {
        let first = word.split(' ').next().unwrap().to_uppercase();
        let says = format!("statement 2 cannot begin with {first}");
        refused(&format!("SELECT 1;\n¶{word}"), &[&says, "Hapax begins and commits"]);
    }
    refused("¶PREPARE TRANSACTION 'x'", &["statement 1 cannot", "Hapax begins and commits"]);
    for word in ["CREATE TABLE x (y)", "drop table x", "ALTER TABLE x", "TRUNCATE x"] {
        refused(&format!("¶{word}"), &["cannot begin with", "migration of your own"]);
    }
    for word in ["SET x = 1", "RESET x", "VACUUM", "LISTEN x", "DISCARD ALL", "show x"] {
        refused(&format!(" ¶{word}; SELECT 1"), &["cannot begin with", "Hapax's"]);
    }
    refused("SELECT 1; SELECT 2; ¶LOCK TABLE x", &["statement 3", "FOR UPDATE"]);
    refused("¶COPY x FROM STDIN", &["cannot begin with COPY", "INSERT INTO"]);
    refused("¶NOTIFY x", &["pg_notify"]);
    refused("¶REPLACE INTO x", &["ON CONFLICT"]);
    refused("¶TABLE x", &["SELECT * FROM"]);
    for word in ["EXPLAIN SELECT 1", "selects", "SELECT_", "'SELECT'", "1", ":id", "\\d"] {
        refused(
            &format!("/* x */ ¶{word}"),
            &["cannot begin with", "begin with SELECT, WITH", "MERGE, VALUES, CALL or DO"],
        );
    }
    refused("((¶COMMIT", &["cannot begin with COMMIT"]);
    refused("(¶:id)", &["cannot begin with :id"]);
    refused("¶(", &["cannot begin with ("]);
    refused("SELECT 1; ¶((", &["statement 2 cannot begin with ("]);
    refused("¶\u{a0}SELECT 1", &["cannot begin with"]);
}

#[test]
fn the_body_of_a_do_is_never_touched_and_a_parameter_beside_it_is_refused() {
    // The content of a string is never changed, even if it is a program.
    check("DO $$ BEGIN x := :id; END $$", &["DO $$ BEGIN x := :id; END $$ {}"]);
    check("do language plpgsql ' :id '", &["do language plpgsql ' :id ' {}"]);
    refused("DO ¶:body", &["DO takes no parameters", ":body", "CALL"]);
    check("SELECT 1 AS do, :id", &["SELECT 1 AS do, $1 {id}"]);
    check(
        "INSERT INTO a VALUES (:id) ON CONFLICT DO NOTHING",
        &["INSERT INTO a VALUES ($1) ON CONFLICT DO NOTHING {id}"],
    );
}

#[test]
fn a_program_without_a_statement_or_without_an_end_is_refused() {
    // The database and the parser would disagree about the end of the statement.
    for empty in ["¶", "¶ \n", "¶;;", "¶-- SELECT 1", "¶/* SELECT 1 /* */ */;"] {
        refused(empty, &["there is no statement"]);
    }
    refused("SELECT ¶'abc", &["a string is not closed"]);
    refused("SELECT ¶'abc''", &["a string is not closed"]);
    refused("SELECT ¶E'abc\\'", &["a string is not closed"]);
    refused("SELECT ¶E'abc'\n'\\'", &["a string is not closed"]);
    refused("SELECT ¶\"abc", &["a quoted name is not closed"]);
    refused("SELECT 1 ¶/* abc", &["a comment is not closed"]);
    refused("SELECT 1 ¶/* /* */ :id", &["a comment is not closed"]);
    refused("SELECT 1 ¶/*/", &["a comment is not closed"]);
    refused("SELECT ¶$a$ $$ $b$ $A$", &["a dollar quote is not closed", "$a$"]);
    refused("SELECT 1 ¶\0; DELETE FROM x", &["NUL"]);
}

#[test]
fn a_position_in_the_database_s_text_maps_back_to_the_user_s_text() {
    // The text has parameters shorter and longer than their numbers, letters of several bytes, and
    // several lines.
    let text = "SELECT 1;\n  SELECT 'é',\n    :idempotency_key, nowhere,\n :id -- x\n , there";
    let program = parse(text).unwrap();
    let statement = &program.statements[1];
    assert_eq!(statement.text, "SELECT 'é',\n    $1, nowhere,\n $2 -- x\n , there");
    for word in ["SELECT", "'é'", "nowhere", "there"] {
        let at = statement.text.find(word).unwrap();
        let expected = place_after(&text[..text.rfind(word).unwrap()]);
        assert_eq!(statement.place_of_byte(at), expected, "{word}");
        let nth = statement.text[..at].chars().count() + 1;
        assert_eq!(statement.place_of_character(nth), expected, "{word}");
    }
    for (number, name) in [("$1", ":idempotency_key"), ("$2", ":id -- x")] {
        let at = statement.text.find(number).unwrap();
        let expected = place_after(&text[..text.find(name).unwrap()]);
        assert_eq!(statement.place_of_byte(at), expected);
        assert_eq!(statement.place_of_byte(at + 1), expected);
    }
    let end = place_after(text);
    assert_eq!(statement.place_of_byte(usize::MAX), end);
    assert_eq!(statement.place_of_character(usize::MAX), end);
    assert_eq!(statement.place_of_character(0), SqlPlace { line: 2, column: 3 });
    assert_eq!(end.to_string(), "line 5, column 9");
}

/// A piece of SQL, and the parameter that it stands for; `None` if the parser leaves the piece
/// unchanged.
fn piece() -> impl Strategy<Value = (String, Option<SqlParameter>)> {
    let known = prop::sample::select(SqlParameter::ALL.to_vec());
    let noise = "[a-zé:;'\"`\\[\\]$?@*/ \n\\\\-]{0,12}(:id|;|:body|\\?)?";
    // Removing one occurrence may create another one from the text around it.
    let without = |mut noise: String, quotes: &[&str]| {
        while let Some(quote) = quotes.iter().find(|quote| noise.contains(**quote)) {
            noise = noise.replace(quote, "");
        }
        noise
    };
    let escaped = |noise: String| noise.replace('\\', "\\\\").replace('\'', "\\'");
    prop_oneof![
        5 => known.prop_map(|known| (format!(":{}", known.name()), Some(known))),
        1 => noise.prop_map(|noise| (format!("'{}'", noise.replace('\'', "''")), None)),
        1 => noise.prop_map(|noise| (format!("U&'{}'", noise.replace('\'', "''")), None)),
        1 => noise.prop_map(|noise| (format!("\"{}\"", noise.replace('"', "\"\"")), None)),
        1 => noise.prop_map(move |noise| (format!("--{}\n", without(noise, &["\n"])), None)),
        1 => noise.prop_map(move |noise| (format!("/*{} */", without(noise, &["*/", "/*"])), None)),
        1 => (noise, noise).prop_map(move |(one, two)| {
            let (one, two) = (without(one, &["*/", "/*"]), without(two, &["*/", "/*"]));
            (format!("/*{one} /*{two} */{one} */"), None)
        }),
        1 => noise.prop_map(move |noise| (format!("$q1${} $q1$", without(noise, &["$q1$"])), None)),
        1 => noise.prop_map(move |noise| (format!("$${} $$", without(noise, &["$"])), None)),
        1 => noise.prop_map(move |noise| (format!("E'{}'", escaped(noise)), None)),
        1 => (noise, noise).prop_map(move |(one, two)| {
            (format!("E'{}' -- '\n '{}'", escaped(one), escaped(two)), None)
        }),
        2 => "(x|1\\.5|::text|::id|:=|,|=|<>|\\|\\||->>|@>|\\?\\||a\\$b|v\\[1:id\\]|v\\[:n\\])"
            .prop_map(|text| (text, None)),
    ]
}

proptest! {
    #[test]
    fn parameters_are_found_among_any_strings_names_and_comments(
        statements in prop::collection::vec(prop::collection::vec(piece(), 0..15), 1..4),
    ) {
        let mut text = String::new();
        let mut expected = Vec::new();
        for pieces in &statements {
            let mut rewritten = "SELECT".to_owned();
            let mut parameters = Vec::new();
            // The start of each piece, in the statement and in the program.
            let mut places = Vec::new();
            text.push_str("SELECT");
            for (piece, parameter) in pieces {
                // An operator separates the pieces, so that no string continues the previous one.
                text.push_str(" +");
                rewritten.push_str(" +");
                places.push((rewritten.len(), place_after(&text)));
                text.push_str(piece);
                match parameter {
                    None => rewritten.push_str(piece),
                    Some(parameter) => {
                        if !parameters.contains(parameter) {
                            parameters.push(*parameter);
                        }
                        let place = parameters.iter().position(|known| known == parameter).unwrap();
                        rewritten.push_str(&format!("${}", place + 1));
                    }
                }
            }
            // The suffix keeps a comment at the end from being removed.
            text.push_str(" x;\n");
            rewritten.push_str(" x");
            expected.push((rewritten, parameters, places));
        }
        let program = parse(&text).unwrap();
        prop_assert_eq!(program.statements.len(), expected.len());
        for (statement, (rewritten, parameters, places)) in program.statements.iter().zip(expected) {
            prop_assert_eq!(&statement.text, &rewritten);
            prop_assert_eq!(&statement.parameters, &parameters);
            for (at, place) in places {
                prop_assert_eq!(statement.place_of_byte(at), place);
            }
        }
    }

    #[test]
    fn any_text_is_judged_without_a_panic_and_errors_point_into_it(
        text in "(SELECT |DO |;|:id|:x|'|\"|`|\\[|\\]|\\(|\\)|--|/\\*|\\*/|\\$|\\$a\\$|E'|U&'|U&\"|\\\\|\n|é|\\?|@|::| |\\PC){0,30}",
        at in 0_usize..99,
    ) {
        match parse(&text) {
            Ok(program) => {
                prop_assert!(!program.statements.is_empty());
                for statement in program.statements {
                    let SqlPlace { line, column } = statement.place_of_byte(at);
                    let line = text.split('\n').nth(line - 1);
                    prop_assert!(line.is_some_and(|line| column <= line.chars().count() + 1));
                }
            }
            Err(error) => {
                let line = text.split('\n').nth(error.line - 1);
                prop_assert!(line.is_some_and(|line| error.column <= line.chars().count() + 1));
            }
        }
    }
}

#[test]
fn a_handler_names_nothing_of_the_schema_hapax_but_documented_functions_and_views() {
    // A handler that deleted an event would make its next copy a new event.
    let own = "belongs to Hapax";
    for marked in [
        "DELETE FROM ¶hapax.event",
        "DELETE FROM ¶HAPAX . \"event\"",
        "SELECT 1;\nUPDATE ¶\"hapax\"/* x */.job SET state = 2",
        "WITH x AS (DELETE FROM app.¶hapax.seen RETURNING 1) SELECT * FROM x",
        "SELECT ¶hapax.done(:id::uuid, 1, '', now())",
        "DO ¶$$ BEGIN DELETE FROM hapax.event; END $$",
        "DO ¶$x$ BEGIN PERFORM 1; TRUNCATE hapax.\"job\"; END $x$",
    ] {
        refused(marked, &[own]);
    }
    // The database reads each of these as hapax.event.
    for marked in [
        "DELETE FROM ¶U&\"h\\0061pax\".event",
        "DELETE FROM ¶u&\"h!0061pax\" UESCAPE '!' . event",
        "DELETE FROM hapax.¶U&\"\\0065vent\"",
        "DO ¶$$ BEGIN DELETE FROM U&\"h\\0061pax\".event; END $$",
    ] {
        refused(marked, &["a name that is written with escapes"]);
    }
    for text in [
        "SELECT hapax.once('a', :event_id)",
        "SELECT HAPAX.publish('t', '{}')",
        "INSERT INTO a SELECT result FROM hapax.processed_events WHERE id = :id::uuid",
        "INSERT INTO event VALUES ('hapax.event', $$hapax.job$$) -- hapax.seen",
        "SELECT hapax, \"Hapax\".event, x.hapax FROM hapaxes.event",
        "DO $$ BEGIN PERFORM hapax.once('a', 'b'); DELETE FROM event; END $$",
    ] {
        parse(text).unwrap_or_else(|error| panic!("{text}\n{error}"));
    }
    for text in ["DELETE FROM hapax.event WHERE id = $1", "SELECT hapax.settle($1)"] {
        let error = SqlProgram::may_begin(text, Dialect::Postgres).expect_err(text);
        assert!(error.problem.contains(own), "{text}: {error}");
    }
    for text in
        ["SELECT hapax.publish($1, $2)", "(SELECT $1) UNION SELECT $2::text", "DELETE FROM event"]
    {
        SqlProgram::may_begin(text, Dialect::Postgres).expect(text);
    }
}

#[test]
fn the_body_of_a_do_is_read_as_the_database_reads_it_or_refused() {
    // A body may hide a name of ours behind escapes, behind a quote that looks like the start of a
    // comment, or in the second half of a string.
    let own = "belongs to Hapax";
    let unread = "the body of this DO cannot be checked";
    for (marked, problem) in [
        ("DO ¶'BEGIN PERFORM ''--''; DELETE FROM hapax.event; END'", own),
        ("DO ¶'BEGIN PERFORM ''/*''; DELETE FROM \"hapax\".event; PERFORM ''*/''; END'", own),
        ("DO LANGUAGE 'plpgsql' ¶'BEGIN DELETE FROM hapax.event; END'", own),
        ("DO ¶E'BEGIN DELETE FROM hapax.event; END'", unread),
        ("DO ¶e'BEGIN DELETE FROM hapa\\x78.event; END'", unread),
        ("DO ¶U&'BEGIN DELETE FROM h\\0061pax.event; END'", unread),
        ("DO ¶u&'BEGIN DELETE FROM h!0061pax.event; END' UESCAPE '!'", unread),
        ("DO ¶'BEGIN DELETE FROM hap'\n'ax.event; END'", unread),
        ("DO ¶'BEGIN DELETE FROM hap' -- '\n'ax.event; END'", unread),
        ("DO ¶U&'BEGIN'\n' DELETE FROM hapax.event; END'", unread),
        ("DO ¶$$ BEGIN PERFORM 'a; DELETE FROM hapax.event; END $$", unread),
        ("DO ¶$$ BEGIN /* DELETE FROM hapax.event; END $$", unread),
    ] {
        refused(marked, &[problem]);
    }
    for text in [
        "DO 'BEGIN PERFORM ''hapax.event'', ''''; END'",
        "DO $$ BEGIN PERFORM 'hapax.event', E'\\'--', U&'hapax.job'; END $$",
        "DO LANGUAGE \"plpgsql\" 'BEGIN END'",
        "DO $$ BEGIN PERFORM 1; END $$ LANGUAGE 'plpgsql'",
        "SELECT 'hap'\n'ax.event', U&'hapax.job'",
    ] {
        parse(text).unwrap_or_else(|error| panic!("{text}\n{error}"));
    }
    let hidden = "DO E'BEGIN DELETE FROM hapax.event; END'";
    let error = SqlProgram::may_begin(hidden, Dialect::Postgres).expect_err(hidden);
    assert!(error.problem.contains(unread), "{error}");
}
