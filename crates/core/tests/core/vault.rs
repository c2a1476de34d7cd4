//! The vault: a value opens only with its key and in its context, and every change is noticed.

use hapax_core::vault::{
    KeyId, NONCE_BYTES, OpenError, RepeatedKey, SealContext, Sealed, Vault, VaultKey, VaultKeyError,
};
use hapax_core::{SourceName, Tenant};
use proptest::prelude::*;

const NONCE: [u8; NONCE_BYTES] = [9; NONCE_BYTES];

fn key(byte: u8) -> VaultKey {
    VaultKey::from_bytes(&[byte; 32])
}

fn vault(current: u8, old: &[u8]) -> Vault {
    Vault::new(key(current), old.iter().map(|byte| key(*byte)).collect()).expect("keys that differ")
}

fn stored(sealed: &Sealed) -> Result<Sealed, OpenError> {
    Sealed::from_bytes(sealed.as_bytes().to_vec())
}

#[test]
fn a_value_moved_to_another_row_tenant_or_purpose_does_not_open() {
    // The attacker can write to the database, and copies a sealed value to a row whose plaintext would be
    // sent to the attacker. The contexts with shifted letters have equal bytes if their lengths are not
    // counted.
    let (acme, acm, default) = (Tenant::new("acme"), Tenant::new("acm"), Tenant::default());
    let (stripe, e1) = (SourceName::new("stripe"), SourceName::new("e1"));
    let contexts = [
        SealContext::endpoint_secrets(&acme, "e1"),
        SealContext::endpoint_secrets(&acme, "e2"),
        SealContext::endpoint_secrets(&acm, "ee1"),
        SealContext::endpoint_secrets(&default, "e1"),
        SealContext::endpoint_headers(&acme, "e1"),
        SealContext::endpoint_headers(&acme, ""),
        SealContext::source_secrets(&acme, &e1),
        SealContext::source_secrets(&acme, &stripe),
    ];
    let vault = vault(1, &[]);
    for (place, from) in contexts.iter().enumerate() {
        let sealed = vault.seal(from, b"plain", NONCE);
        for (other, to) in contexts.iter().enumerate() {
            match vault.open(to, &sealed) {
                Ok(plain) => assert!(place == other && *plain == b"plain", "{from:?} as {to:?}"),
                Err(error) => {
                    assert!(place != other, "{from:?}");
                    assert_eq!(error, OpenError::Damaged);
                }
            }
        }
    }
}

#[test]
fn a_key_is_rotated_without_a_moment_at_which_a_node_cannot_open_a_value() {
    // Nodes are restarted one after the other: at each step some have the older config.
    let tenant = Tenant::default();
    let context = SealContext::endpoint_secrets(&tenant, "e1");
    let (before, prepared, swapped) = (vault(1, &[]), vault(1, &[2]), vault(2, &[1]));
    let (under_one, under_two) =
        (prepared.seal(&context, b"plain", NONCE), swapped.seal(&context, b"plain", NONCE));
    for (vault, sealed) in [
        (&before, &under_one),
        (&prepared, &under_one),
        (&prepared, &under_two),
        (&swapped, &under_one),
        (&swapped, &under_two),
    ] {
        assert_eq!(vault.open(&context, sealed).as_deref(), Ok(&b"plain".to_vec()));
    }
    assert!(swapped.needs_reseal(&under_one) && !swapped.needs_reseal(&under_two));
    assert!(!prepared.needs_reseal(&under_one));

    // A node that does not have the key says which one it needs.
    let unknown = Err(OpenError::UnknownKey(key(2).id()));
    assert_eq!(before.open(&context, &under_two), unknown);
    assert_eq!(vault(2, &[]).open(&context, &under_one), Err(OpenError::UnknownKey(key(1).id())));
    assert_eq!(swapped.key_ids().collect::<Vec<_>>(), [key(2).id(), key(1).id()]);
    assert_eq!(swapped.current_key_id(), key(2).id());
}

#[test]
fn equal_keys_in_one_vault_are_refused() {
    // With the new key in both places the old one is missing, and nothing opens.
    let repeated = |byte: u8| Some(RepeatedKey(key(byte).id()));
    assert_eq!(Vault::new(key(1), vec![key(2), key(1)]).err(), repeated(1));
    assert_eq!(Vault::new(key(1), vec![key(2), key(2)]).err(), repeated(2));
}

#[test]
fn a_key_is_32_bytes_of_base64_and_an_error_does_not_quote_it() {
    // Keys that are short, long, in hex, or a password; an error that quoted one would put it into a log.
    fn check(text: &str, expected: Result<KeyId, VaultKeyError>) {
        assert_eq!(VaultKey::from_base64(text).map(|key| key.id()), expected, "{text:?}");
    }
    let ones = "AQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQE";
    check(&format!("{ones}="), Ok(key(1).id()));
    check(&format!(" {ones}\n"), Ok(key(1).id()));
    check("", Err(VaultKeyError::WrongLength(0)));
    check("AQEB", Err(VaultKeyError::WrongLength(3)));
    check(&ones[..42], Err(VaultKeyError::WrongLength(31)));
    check(&ones[..41], Err(VaultKeyError::NotBase64));
    check(&"AQEB".repeat(11), Err(VaultKeyError::WrongLength(33)));
    check("hunter2 hunter2", Err(VaultKeyError::NotBase64));
    check(&"01".repeat(32), Err(VaultKeyError::WrongLength(48)));
    assert!(!VaultKeyError::NotBase64.to_string().contains("hunter2"));
}

#[test]
fn the_vault_prints_neither_keys_nor_plaintexts() {
    // A debug print of any value must hold neither the key nor the plaintext, in bytes, hex or base64.
    let tenant = Tenant::default();
    let context = SealContext::endpoint_secrets(&tenant, "e1");
    let vault = vault(0xab, &[0xcd]);
    let sealed = vault.seal(&context, b"canary", NONCE);
    let damaged = Sealed::from_bytes(vec![1; 10]);
    let shown = format!("{vault:?} {:?} {sealed:?} {context:?} {damaged:?}", key(0xab));
    for secret in ["canary", "abab", "cdcd", "171, 171", "q6ur", "99, 97"] {
        assert!(!shown.contains(secret), "{shown}");
    }
    assert!(shown.contains(&key(0xab).id().to_string()), "{shown}");
}

#[test]
fn a_value_of_a_newer_version_is_not_reported_as_damaged() {
    // During an upgrade a node may read values that a newer node wrote.
    let tenant = Tenant::default();
    let sealed = vault(1, &[]).seal(&SealContext::endpoint_secrets(&tenant, "e1"), b"plain", NONCE);
    let mut bytes = sealed.as_bytes().to_vec();
    bytes[0] = 2;
    assert_eq!(Sealed::from_bytes(bytes), Err(OpenError::UnknownFormat(2)));
    assert_eq!(Sealed::from_bytes(Vec::new()), Err(OpenError::Damaged));
}

#[test]
fn a_stored_value_of_this_format_stays_readable() {
    // The value was sealed by the first version of this format, and by another implementation of
    // the cipher. If this test fails, stored secrets could no longer be opened.
    let stored =
        "0177bdb8ec0f7165ba0909090909090909090909095dbb8fa2ea196cfdd5d72f2efe2e9bb3e110302241";
    let tenant = Tenant::new("acme");
    let context = SealContext::endpoint_secrets(&tenant, "e1");
    let sealed = Sealed::from_bytes(hex::decode(stored).expect("hex")).expect("a sealed value");
    assert_eq!(vault(7, &[]).open(&context, &sealed).as_deref(), Ok(&b"plain".to_vec()));
}

proptest! {
    #[test]
    fn a_sealed_value_opens_and_any_change_of_a_bit_or_the_length_is_noticed(
        plain in prop::collection::vec(any::<u8>(), 0..200),
        key in any::<[u8; 32]>(),
        nonce in any::<[u8; NONCE_BYTES]>(),
        tenant in "[a-z]{1,8}",
        owner in ".{0,20}",
        at in any::<prop::sample::Index>(),
        bit in 0_u8..8,
    ) {
        let tenant = Tenant::new(tenant);
        let context = SealContext::endpoint_headers(&tenant, &owner);
        let vault = Vault::new(VaultKey::from_bytes(&key), Vec::new()).expect("one key");
        let sealed = vault.seal(&context, &plain, nonce);
        let opened = vault.open(&context, &stored(&sealed).expect("a sealed value"));
        prop_assert_eq!(opened.as_deref(), Ok(&plain));

        let mut flipped = sealed.as_bytes().to_vec();
        let at = at.index(flipped.len());
        flipped[at] ^= 1 << bit;
        let flipped = Sealed::from_bytes(flipped).and_then(|sealed| vault.open(&context, &sealed));
        prop_assert!(flipped.is_err());

        let cut = sealed.as_bytes()[..at].to_vec();
        let cut = Sealed::from_bytes(cut).and_then(|sealed| vault.open(&context, &sealed));
        prop_assert_eq!(cut, Err(OpenError::Damaged));

        let mut longer = sealed.as_bytes().to_vec();
        longer.push(bit);
        let longer = Sealed::from_bytes(longer).and_then(|sealed| vault.open(&context, &sealed));
        prop_assert_eq!(longer, Err(OpenError::Damaged));
    }
}
