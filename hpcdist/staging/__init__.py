from hpcdist.staging.save import save
from hpcdist.staging.load import load
