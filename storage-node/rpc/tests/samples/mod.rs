//! One sample of every request and answer; each field differs, so that a swap shows.

#![allow(clippy::cast_possible_truncation, reason = "the numbers of tests are small")]

use bytes::Bytes;
use chain::id::{
    ChainId, ChainVersion, ChannelId, ChunkId, ClientId, InodeId, NodeId, RoutingVersion, TargetId,
    UpdateId, UpdateVersion,
};
use chain::layout::Layout;
use chain::replica::{Era, Identity};
use chain::table::{Chain, ChainTarget, PublicState};
use rpc::codec::Wire;
use rpc::message::Request;
use rpc::message::chain::{
    AppliedUpdate, ChunkPage, ForgetChunk, Forward, Link, ListChunks, ListedChunk, SyncDone,
};
use rpc::message::manager::*;
use rpc::message::meta::*;
use rpc::message::storage::*;
use rpc::{Code, Error};

pub(crate) struct Sample {
    pub(crate) name: String,
    pub(crate) kind: u16,
    pub(crate) is_response: bool,
    pub(crate) status: u32,
    pub(crate) head: Bytes,
    pub(crate) payload: &'static [u8],
}

fn pair<R: Request>(name: &str, request: &R, response: &R::Response) -> Vec<Sample> {
    with_payloads(name, request, b"", response, b"")
}

fn with_payloads<R: Request>(
    name: &str,
    request: &R,
    sent: &'static [u8],
    response: &R::Response,
    answered: &'static [u8],
) -> Vec<Sample> {
    let sample = |suffix: &str, is_response, head, payload| Sample {
        name: format!("{:04x}-{name}.{suffix}", R::KIND.0),
        kind: R::KIND.0,
        is_response,
        status: 0,
        head,
        payload,
    };
    vec![
        sample("request", false, request.to_bytes(), sent),
        sample("answer", true, response.to_bytes(), answered),
    ]
}

const CHUNK: ChunkId = ChunkId { file: InodeId::new(0x1112), index: 0x13 };
const ID: UpdateId =
    UpdateId { client: ClientId::new(0x2122), channel: ChannelId::new(0x23), seq: 0x24 };

fn identity(n: u64) -> Identity {
    let checksum = 0x3300 + n as u32;
    Identity { assigned: ChainVersion::new(n), version: UpdateVersion::new(n + 1), checksum }
}

fn link() -> Link {
    Link {
        chain: ChainId::new(0x41),
        chain_version: ChainVersion::new(0x42),
        target: TargetId::new(0x43),
    }
}

fn the_chain() -> Chain {
    let targets = (1..).zip(PublicState::ALL);
    let targets = targets.map(|(n, state)| ChainTarget { id: TargetId::new(n), state }).collect();
    Chain { id: ChainId::new(0x51), version: ChainVersion::new(0x52), targets }
}

pub(crate) fn chain() -> Bytes {
    the_chain().to_bytes()
}

fn storage() -> Vec<Sample> {
    let (chain, chain_version, target) =
        (ChainId::new(0x41), ChainVersion::new(0x42), TargetId::new(0x43));
    let read = Read {
        chain,
        chain_version,
        target,
        chunk: CHUNK,
        offset: 0x61,
        length: 0x62,
        relaxed: true,
    };
    let version = UpdateVersion::new(0x63);
    let read_done = ReadDone { version, chunk_length: 0x64, checksum: crc32c::crc32c(b"bytes") };
    let update = Update {
        chain,
        chain_version,
        target,
        chunk: CHUNK,
        id: ID,
        truncate_generation: 0x65,
        op: UpdateOp::Write { offset: 0x66 },
        chunk_size: 1 << 20,
        checksum: crc32c::crc32c(b"bytes"),
    };
    let update_done = UpdateDone { version, chunk_length: 0x67 };
    let query = QueryFile {
        chain,
        chain_version,
        target,
        file: InodeId::new(0x68),
        from_index: 0x69,
        limit: 0x6a,
    };
    let length = |index| ChunkLength { index, length: 0x6b };
    let chunks = FileChunks { chunks: vec![length(0x6c)], last: Some(length(0x6d)) };
    let mut out = with_payloads("read", &read, b"", &read_done, b"bytes");
    out.extend(with_payloads("update", &update, b"bytes", &update_done, b""));
    out.extend(pair("query-file", &query, &chunks));
    out
}

fn neighbours() -> Vec<Sample> {
    let applied = AppliedUpdate {
        client: ClientId::new(0x71),
        channel: ChannelId::new(0x72),
        seq: 0x73,
        version: UpdateVersion::new(0x74),
        length: 0x75,
    };
    let era = Era { incarnation: 0x44, given_up: 0x45 };
    let forward = Forward {
        link: link(),
        era,
        chunk: CHUNK,
        id: ID,
        identity: identity(0x76),
        base: Some(identity(0x78)),
        truncate_generation: 0x7a,
        op: Some(UpdateOp::Truncate { length: 0x7b }),
        removed: true,
        duplicates: vec![applied],
        checksum: 0,
    };
    let list = ListChunks { link: link(), after: Some(CHUNK), limit: 0x7c };
    let listed = ListedChunk { chunk: CHUNK, committed: Some(identity(0x7d)), is_pending: true };
    let page = ChunkPage { chunks: vec![listed], is_last: true, incarnation: 0x7f };
    let mut out = pair("forward", &forward, &());
    out.extend(pair("list-chunks", &list, &page));
    out.extend(pair("forget-chunk", &ForgetChunk { link: link(), era, chunk: CHUNK }, &()));
    out.extend(pair("sync-done", &SyncDone { link: link(), incarnation: 0x7f }, &()));
    out
}

fn managers() -> Vec<Sample> {
    let report = TargetReport {
        target: TargetId::new(0x81),
        chain: ChainId::new(0x82),
        chain_version: ChainVersion::new(0x83),
        state: LocalState::UpToDate,
        used_bytes: 0x84,
    };
    let heartbeat = Heartbeat {
        cluster: "train".into(),
        node: NodeId::new(10_001),
        incarnation: 0x85,
        address: "10.0.0.1:9100".into(),
        targets: vec![report],
        capacity_bytes: 0x86,
        used_bytes: 0x87,
        routing: RoutingVersion::new(0x88),
    };
    let address = NodeAddress { node: NodeId::new(10_001), address: "10.0.0.1:9100".into() };
    let routing = Routing {
        version: RoutingVersion::new(0x89),
        table: 1,
        chunk_size_bytes: 1 << 20,
        stripe: 0x8a,
        chains: vec![the_chain()],
        nodes: vec![address],
    };
    let assignment =
        TargetAssignment { target: TargetId::new(0x8b), chain: ChainId::new(0x8c), disk: 0x8d };
    let done = HeartbeatDone {
        lease_ms: 6_000,
        targets: vec![assignment],
        routing: Some(routing.clone()),
    };
    let get = GetRouting { known: RoutingVersion::new(0x8e), wait_ms: 0x8f };
    let mut out = pair("heartbeat", &heartbeat, &done);
    out.extend(pair("get-routing", &get, &RoutingDone { routing: Some(routing) }));
    out
}

fn attributes() -> Attributes {
    Attributes {
        inode: InodeId::new(0x91),
        kind: FileKind::File,
        mode: 0o644,
        uid: 0x92,
        gid: 0x93,
        links: 0x94,
        length: 0x95,
        accessed_ns: 0x96,
        modified_ns: 0x97,
        changed_ns: 0x98,
        truncate_generation: 0x99,
        layout: Some(Layout {
            table: 1,
            chains: 6,
            stripe: 3,
            chunk_size_bytes: 1 << 20,
            seed: 0x9a,
        }),
    }
}

fn caller() -> Caller {
    Caller { client: ClientId::new(0xa1), request: 0xa2, uid: 0xa3, gid: 0xa4 }
}

fn inodes() -> Vec<Sample> {
    let (parent, inode) = (InodeId::new(0xa5), InodeId::new(0xa6));
    let name = Bytes::from_static(b"name");
    let opened = Opened { attributes: attributes(), session: 0xa7 };
    let set = SetAttributes {
        caller: caller(),
        inode,
        mode: Some(0o600),
        uid: None,
        gid: Some(0xa8),
        accessed_ns: None,
        modified_ns: Some(0xa9),
    };
    let create =
        Create { caller: caller(), parent, name: name.clone(), mode: 0o640, exclusive: true };
    let report = ReportLength {
        caller: caller(),
        inode,
        session: 0xaa,
        length: 0xab,
        truncate_generation: 0xac,
        modified_ns: 0xad,
        close: true,
    };
    let mut out = pair("lookup", &Lookup { parent, name }, &attributes());
    out.extend(pair("get-attributes", &GetAttributes { inode }, &attributes()));
    out.extend(pair("set-attributes", &set, &attributes()));
    out.extend(pair("create", &create, &opened));
    out.extend(pair("open", &Open { caller: caller(), inode, write: true }, &opened));
    out.extend(pair("report-length", &report, &attributes()));
    let truncate = Truncate { caller: caller(), inode, length: 0xae };
    out.extend(pair("truncate", &truncate, &attributes()));
    out
}

fn names() -> Vec<Sample> {
    let (parent, inode) = (InodeId::new(0xb1), InodeId::new(0xb2));
    let name = Bytes::from_static(b"name");
    let target = Bytes::from_static(b"target");
    let directory = MakeDirectory { caller: caller(), parent, name: name.clone(), mode: 0o755 };
    let link = MakeSymlink { caller: caller(), parent, name: name.clone(), target: target.clone() };
    let remove = Remove { caller: caller(), parent, name: name.clone(), directory: true };
    let rename = Rename {
        caller: caller(),
        parent,
        name: name.clone(),
        new_parent: InodeId::new(0xb3),
        new_name: Bytes::from_static(b"new"),
        no_replace: true,
    };
    let entry = DirectoryEntry { name, cookie: 0xb4, attributes: attributes() };
    let page = DirectoryPage { entries: vec![entry], end: true, parent };
    let stat = FileSystemStat { capacity_bytes: 0xb5, free_bytes: 0xb6, inodes: 0xb7 };
    let keep = KeepSessions { client: ClientId::new(0xb8), acknowledged: 0xb9 };
    let mut out = pair("make-directory", &directory, &attributes());
    out.extend(pair("make-symlink", &link, &attributes()));
    out.extend(pair("read-symlink", &ReadSymlink { inode }, &SymlinkTarget { target }));
    out.extend(pair("remove", &remove, &()));
    out.extend(pair("rename", &rename, &()));
    let read = ReadDirectory { inode, cookie: 0xba, limit: 0xbb };
    out.extend(pair("read-directory", &read, &page));
    out.extend(pair("stat-file-system", &StatFileSystem { inode }, &stat));
    out.extend(pair("keep-sessions", &keep, &()));
    out
}

pub(crate) fn samples() -> Vec<Sample> {
    let error = Error::new(Code::StaleChain, "chain is at version 8").with_detail(8);
    let failed = Sample {
        name: "0101-read.failure".into(),
        kind: Read::KIND.0,
        is_response: true,
        status: error.code.number(),
        head: error.to_head(),
        payload: b"",
    };
    let all = [storage(), neighbours(), managers(), inodes(), names(), vec![failed]];
    all.into_iter().flatten().collect()
}
