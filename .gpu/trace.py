"""Trace one judgement: python3 .gpu/trace.py REF OUT"""
import sys, time, os, functools
T0=time.time()
from weft.workbench.sandbox import fork_client
fork_client.prepare()
import torch
from pathlib import Path
from weft.workbench.judge import judge as J
from weft.workbench.sandbox import process, caller
from weft.workbench.check import oracle as O, output_judge as OJ
from weft.workbench.timing import session as S, recheck as R, sampled_outputs as SO, composed_candidate as CC
from weft.workbench import bench as B
from weft import machine
from weft.workbench.sandbox import remote_timing as RT
ref, out = sys.argv[1:3]
f=open(out,'w'); depth=0
ini=time.time()
def used():
    if not torch.cuda.is_initialized(): return 0,0,0
    free,total=torch.cuda.mem_get_info()
    return (total-free)>>20, torch.cuda.memory_allocated()>>20, torch.cuda.memory_reserved()>>20
def wrap(obj,name,label=None,least=0.02):
    fn=getattr(obj,name)
    label=label or name
    @functools.wraps(fn)
    def g(*a,**k):
        global depth
        t=time.time(); depth+=1
        try: return fn(*a,**k)
        finally:
            depth-=1
            d=time.time()-t
            if d>=least:
                l=label(a,k) if callable(label) else label
                u,al,re=used()
                f.write(f"{time.time()-T0:7.2f} {d:6.2f}s used {u:7d} own {al:6d} reserved {re:6d} {'  '*depth}{l}\n"); f.flush()
    setattr(obj,name,g)
def lab(a,k):
    p=a[2] if len(a)>2 else k.get('payload')
    return f"request {a[1]} "+str({x:y for x,y in (p or {}).items() if x in ('indexes','seed','repeats','mode','positions','count')})[:100]
wrap(process.Sandbox,'request',lab)
wrap(process.Sandbox,'__init__','SANDBOX init')
wrap(process.Sandbox,'_await_worker','await worker')
wrap(caller.WorkerProcess,'__init__','WORKER start')
wrap(O.Oracle,'_compare','oracle._compare')
wrap(O.Oracle,'answer','oracle.answer')
wrap(OJ,'judge','output_judge.judge (make)')
for n in ('prepare','sample','finish_audits','judge_samples','measure_side_times','audit','recheck','outcomes','_prepare_candidate'):
    wrap(S.TimingSession,n,'SESSION '+n)
wrap(R.Recheck,'_verify','recheck._verify')
wrap(SO.SampledOutputs,'take','sampled.take'); wrap(SO.SampledOutputs,'take_audit','sampled.take_audit')
wrap(B,'measured_ceilings','ceilings'); wrap(machine,'fingerprint','fingerprint'); wrap(B,'measure_load','measure_load')
wrap(B,'measure','bench.measure'); wrap(B,'_add_kernels','bench.add_kernels'); wrap(B,'judge','bench.judge(make)')
for n in ('_read_problem','_judge_problem'): wrap(J,n,'JUDGE '+n)
for n in ('_check','_time','_observe_kernels','_apply_own_check'): wrap(J._Judging,n,'JUDGE '+n)
wrap(J,'_compute_reference','JUDGE compute_reference')
wrap(RT.RemoteTimedCandidate,'cross_check','cross_check')
f.write(f"{time.time()-T0:7.2f} imported\n")
import shutil
cand=Path(out+'_cand.py'); src=Path(ref).read_text().replace('class Model(','class ModelNew(').replace('super(Model,','super(ModelNew,'); cand.write_text(src)
r=J.judge(Path(ref),cand,J.JudgeOptions(device='cuda'))
f.write(f"{time.time()-T0:7.2f} done: {r.correct} {r.reason} {r.notes} {r.flags} {r.step_seconds if hasattr(r,'step_seconds') else ''}\n")
print(Path(ref).name, round(time.time()-T0,1), r.correct, r.reason)
