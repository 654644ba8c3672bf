//! Cyclic difference families: designs from a few base blocks, shifted around a circle of nodes.
//!
//! If the differences inside the base blocks cover every distance on the circle equally often,
//! all shifts of the blocks make any two nodes meet equally often. Singer's difference sets
//! (projective planes: 7, 13, 31 nodes …) are the case of one block. The base blocks are found by
//! depth-first search with a bounded number of steps; without success local search takes over.

use super::Problem;
use super::rng::Rng;

/// Steps of one attempt, and attempts with other random choices: well below a second together.
const STEPS_MAX: u32 = 60_000;
const ATTEMPTS: u32 = 12;

/// An exactly balanced arrangement, where the numbers allow a cyclic one and it was found.
pub(super) fn construct(problem: &Problem, rng: &mut Rng) -> Option<Vec<Vec<usize>>> {
    let (v, k, r) = (problem.ids.len(), problem.replicas, problem.degree);
    if v == k {
        return Some(vec![(0..v).collect(); r]);
    }
    let blocks = r / k;
    let divisible = r.is_multiple_of(k) && (r * (k - 1)).is_multiple_of(v - 1);
    if k < 2 || !divisible || !problem.is_free() {
        return None;
    }
    let lambda = r * (k - 1) / (v - 1);
    let base = (0..ATTEMPTS).find_map(|_| Family::new(v, k, blocks, lambda, rng).find())?;
    let shifted = |block: &Vec<usize>, by: usize| block.iter().map(|n| (n + by) % v).collect();
    Some((0..v).flat_map(|by| base.iter().map(move |block| shifted(block, by))).collect())
}

/// The search for `blocks` base blocks of `k` elements in which every distance occurs `lambda`
/// times.
struct Family<'a> {
    v: usize,
    k: usize,
    blocks: usize,
    lambda: usize,
    /// How often each distance `1..v` occurs so far.
    used: Vec<usize>,
    steps: u32,
    rng: &'a mut Rng,
}

impl<'a> Family<'a> {
    fn new(v: usize, k: usize, blocks: usize, lambda: usize, rng: &'a mut Rng) -> Self {
        Self { v, k, blocks, lambda, used: vec![0; v], steps: 0, rng }
    }

    fn find(mut self) -> Option<Vec<Vec<usize>>> {
        let mut done = Vec::new();
        self.extend(&mut done, vec![0]).then_some(done)
    }

    /// Completes `block`, then the blocks after it. Leaves everything as it was on failure.
    fn extend(&mut self, done: &mut Vec<Vec<usize>>, block: Vec<usize>) -> bool {
        self.steps += 1;
        if block.len() == self.k {
            done.push(block);
            if done.len() == self.blocks || self.extend(done, vec![0]) {
                return true;
            }
            done.pop();
            return false;
        }
        let mut candidates = self.candidates(&block);
        self.rng.shuffle(&mut candidates);
        for candidate in candidates {
            if self.steps > STEPS_MAX {
                return false;
            }
            if !self.take(&block, candidate) {
                continue;
            }
            let mut longer = block.clone();
            longer.push(candidate);
            if self.extend(done, longer) {
                return true;
            }
            self.give_back(&block, candidate);
        }
        false
    }

    /// The second element fixes the smallest distance that is still short, without loss of
    /// generality; later ones are free.
    fn candidates(&self, block: &[usize]) -> Vec<usize> {
        if block.len() == 1 {
            return (1..self.v).find(|d| self.used[*d] < self.lambda).into_iter().collect();
        }
        (1..self.v).filter(|c| !block.contains(c)).collect()
    }

    fn distances(&self, block: &[usize], candidate: usize) -> Vec<usize> {
        let v = self.v;
        block.iter().flat_map(|b| [(candidate + v - b) % v, (b + v - candidate) % v]).collect()
    }

    fn take(&mut self, block: &[usize], candidate: usize) -> bool {
        for d in self.distances(block, candidate) {
            self.used[d] += 1;
        }
        let fits = self.distances(block, candidate).iter().all(|d| self.used[*d] <= self.lambda);
        if !fits {
            self.give_back(block, candidate);
        }
        fits
    }

    fn give_back(&mut self, block: &[usize], candidate: usize) {
        for d in self.distances(block, candidate) {
            self.used[d] -= 1;
        }
    }
}
