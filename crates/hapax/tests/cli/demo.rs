//! The demo of a double charge, run by the real binary.

use crate::common::hapax;
use serde_json::Value;

#[test]
fn the_demo_charges_twice_without_hapax_and_once_with_it() {
    // Both ledgers get the same requests, and no constraint would hide a second fee.
    let run = hapax(&["demo", "--json"]).run();
    assert_eq!(run.code, 0, "{run:?}");
    let ledgers: Vec<Value> =
        run.stdout.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let [naive, ours] = &ledgers[..] else { panic!("{run:?}") };
    for ledger in [naive, ours] {
        assert_eq!((&ledger["requests"], &ledger["acked"]), (&50.into(), &50.into()), "{run:?}");
        assert_eq!(ledger["owed"], 250, "{run:?}");
    }
    assert!(naive["charged"].as_u64() > Some(250), "{run:?}");
    assert_eq!(ours["charged"], 250, "{run:?}");
    let fees = |ledger: &Value| ledger["fees"].as_object().unwrap().clone();
    assert!(fees(naive).keys().eq(fees(ours).keys()), "the same payouts: {run:?}");
    assert!(fees(ours).values().all(|count| *count == 1), "{run:?}");
}

#[test]
fn the_demo_reads_well_and_leaves_nothing_behind() {
    let dir = tempfile::tempdir().unwrap();
    let temporary = dir.path().display().to_string();
    let run = hapax(&["demo", "--copies", "3"]).env("TMPDIR", &temporary).run();
    assert_eq!(run.code, 0, "{run:?}");
    assert!(run.stdout.contains("to Hapax: 15 requests, 15 answered 200"), "{run:?}");
    assert!(run.stdout.ends_with("  charged 250, which is right\n"), "{run:?}");
    assert!(!run.stdout.contains("whsec") && !run.stderr.contains("whsec"), "{run:?}");
    assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0, "{run:?}");
}
