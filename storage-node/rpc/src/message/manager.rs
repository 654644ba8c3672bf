//! Messages that the manager answers: to storage servers, and to everybody who needs routing.

use chain::id::{ChainId, ChainVersion, NodeId, RoutingVersion, TargetId};
use chain::table::{Chain, ChainTarget, PublicState};

use crate::{request, wire_enum, wire_fields, wire_struct};

wire_enum!(PublicState { Serving = 1, Syncing = 2, Waiting = 3, LastServing = 4, Offline = 5, });
wire_fields!(ChainTarget { id: TargetId, state: PublicState });
wire_fields!(Chain { id: ChainId, version: ChainVersion, targets: Vec<ChainTarget>, });

/// What a storage server says about one of its targets.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum LocalState {
    /// Its disk works; whether it is complete is not claimed.
    Online,
    /// It holds everything that its predecessor had committed when sync ended, under the chain
    /// version that the report carries.
    UpToDate,
    /// Its disk failed.
    Offline,
}
wire_enum!(LocalState { Online = 1, UpToDate = 2, Offline = 3, });

wire_struct! {
    /// One target in a heartbeat.
    pub struct TargetReport {
        /// The target.
        pub target: TargetId,
        /// Its chain.
        pub chain: ChainId,
        /// The newest version of the chain that the target has stored durably; 0 if it was never
        /// told one.
        pub chain_version: ChainVersion,
        /// How it is.
        pub state: LocalState,
        /// Stored bytes.
        pub used_bytes: u64,
    }
}

wire_struct! {
    /// Sent by a storage server each second, and at once after a change.
    pub struct Heartbeat {
        /// The cluster that the server was told to join.
        pub cluster: String,
        /// The server.
        pub node: NodeId,
        /// Random for each start of the process: an old process of the same node is refused.
        pub incarnation: u64,
        /// Where clients and neighbours reach it, `host:port`.
        pub address: String,
        /// All targets of its disks.
        pub targets: Vec<TargetReport>,
        /// Size of its disks in bytes.
        pub capacity_bytes: u64,
        /// Stored bytes of its disks.
        pub used_bytes: u64,
        /// The routing table that the server has.
        pub routing: RoutingVersion,
    }
}

wire_struct! {
    /// Answer to [`Heartbeat`]. The lease counts from when the request was *sent*.
    pub struct HeartbeatDone {
        /// For how long the server may answer clients, in milliseconds.
        pub lease_ms: u32,
        /// The targets that the declared table puts on this node.
        pub targets: Vec<TargetAssignment>,
        /// The routing table, if the server's is older.
        pub routing: Option<Routing>,
    }
}

wire_struct! {
    /// A target that a node has to hold.
    pub struct TargetAssignment {
        /// The target.
        pub target: TargetId,
        /// Its chain.
        pub chain: ChainId,
        /// The position of its disk among the node's disks, from 0.
        pub disk: u32,
    }
}
request!(Heartbeat = 0x0201 -> HeartbeatDone);

wire_struct! {
    /// Where a storage server is.
    pub struct NodeAddress {
        /// The server.
        pub node: NodeId,
        /// `host:port`.
        pub address: String,
    }
}

wire_struct! {
    /// The routing table of a cluster.
    pub struct Routing {
        /// Grows at each change.
        pub version: RoutingVersion,
        /// The declared table; 0 if none was declared yet.
        pub table: u32,
        /// Chunk size of new files in bytes.
        pub chunk_size_bytes: u32,
        /// Chains of new files' layouts at most; 0 = decide by the number of chains.
        pub stripe: u32,
        /// All chains, in order of id.
        pub chains: Vec<Chain>,
        /// All servers that have registered.
        pub nodes: Vec<NodeAddress>,
    }
}

wire_struct! {
    /// Asks for the routing table if it is newer than `known`; waits up to `wait_ms` for one.
    pub struct GetRouting {
        /// The version that the caller has, 0 for none.
        pub known: RoutingVersion,
        /// How long the manager may hold the answer back, in milliseconds.
        pub wait_ms: u32,
    }
}

wire_struct! {
    /// Answer to [`GetRouting`].
    pub struct RoutingDone {
        /// None if `known` is the newest.
        pub routing: Option<Routing>,
    }
}
request!(GetRouting = 0x0202 -> RoutingDone);
