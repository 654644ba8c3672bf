use super::*;
use proptest::prelude::*;

fn inode() -> Inode {
    let layout = Layout { table: 1, chains: 3, stripe: 3, chunk_size_bytes: 1 << 20, seed: 9 };
    Inode {
        kind: FileKind::File,
        mode: 0o644,
        uid: 1,
        gid: 2,
        links: 1,
        length: 1 << 40,
        accessed_ns: 1,
        modified_ns: 2,
        changed_ns: 3,
        truncate_generation: 4,
        layout: Some(layout),
        parent: InodeId::new(0),
        target: Bytes::new(),
    }
}

#[test]
fn an_inode_has_the_bytes_of_the_schema() {
    let value = inode().to_value();
    let hex: String = value.iter().map(|b| format!("{b:02x}")).collect();
    let expected = "01 01 a4010000 01000000 02000000 01000000 0000000000010000 \
        0100000000000000 0200000000000000 0300000000000000 0400000000000000 \
        01 01000000 03000000 03000000 00001000 0900000000000000 0000000000000000 00000000";
    assert_eq!(hex, expected.replace(' ', ""));
    assert_eq!(Inode::from_value(b"k", &value.into()), Ok(inode()));
}

#[test]
fn a_value_of_a_newer_build_is_refused_by_name_of_its_key() {
    let mut value = inode().to_value();
    value[0] = 2;
    let key = inode_key(InodeId::new(1));
    let error = Inode::from_value(&key, &value.into()).unwrap_err();
    assert_eq!(
        error.to_string(),
        "value of INOD\\x01\\x00\\x00\\x00\\x00\\x00\\x00\\x00 has record version 2, this build reads 1"
    );
}

#[test]
fn a_client_of_an_older_build_is_one_that_acknowledged_nothing() {
    let key = client_key(ClientId::new(3));
    let read = |value: &'static [u8]| ClientRecord::from_value(&key, &Bytes::from_static(value));
    assert_eq!(read(&[1]), Ok(ClientRecord { acknowledged: 0 }));
    assert!(matches!(read(&[1, 9]), Err(SchemaError::Value { .. })), "a mark has no fields");
    let written = ClientRecord { acknowledged: 0x0102 }.to_value();
    assert_eq!(written, [2, 2, 1, 0, 0, 0, 0, 0, 0]);
    let again = ClientRecord::from_value(&key, &written.into());
    assert_eq!(again, Ok(ClientRecord { acknowledged: 0x0102 }));
    let error = read(&[3, 2, 1, 0, 0, 0, 0, 0, 0]).unwrap_err().to_string();
    assert!(error.ends_with("has record version 3, this build reads 2"), "{error}");
}

#[test]
fn every_cut_of_a_value_is_an_error() {
    let value = Bytes::from(inode().to_value());
    for cut in 0..value.len() {
        assert!(Inode::from_value(b"k", &value.slice(..cut)).is_err(), "cut at {cut}");
    }
}

#[test]
fn dentry_keys_sort_by_cookie_within_their_directory() {
    let hash = HashKey::new(1);
    let parent = InodeId::new(0x1122);
    let mut names: Vec<Vec<u8>> = (0..100u8).map(|i| vec![b'a', i]).collect();
    names.sort_by_key(|name| hash.cookie(name));
    let keys: Vec<_> = names.iter().map(|name| dentry_key(&hash, parent, name)).collect();
    assert!(keys.is_sorted());
    let (begin, end) = dentries_from(parent, 0);
    assert!(keys.iter().all(|k| begin < *k && *k < end));
    let (found, cookie, name) = parse_dentry_key(&keys[7]).unwrap();
    assert_eq!((found, cookie, name), (parent, hash.cookie(&names[7]), &names[7][..]));
}

#[test]
fn prefixes_are_distinct() {
    let mut sorted = PREFIXES;
    sorted.sort_unstable();
    assert!(sorted.windows(2).all(|w| w[0] != w[1]));
}

#[test]
fn session_keys_by_client_are_read_back() {
    let (client, inode) = (ClientId::new(u128::MAX - 5), InodeId::new(77));
    let key = client_session_key(client, inode, 12);
    assert_eq!(parse_client_session_key(&key), Ok((inode, 12)));
    let (begin, end) = sessions_of_client(client);
    assert!(begin < key && key < end);
}

proptest! {
    #[test]
    fn any_bytes_are_a_value_or_an_error(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
        fuzz_value(&bytes);
    }

    #[test]
    fn a_mutated_value_is_a_value_or_an_error(at in 0usize..200, byte in any::<u8>()) {
        let mut value = inode().to_value();
        let at = at % value.len();
        value[at] = byte;
        fuzz_value(&value);
    }
}
